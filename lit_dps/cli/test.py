"""test: evaluate a checkpoint of `fit` on the test split."""

from lit_dps.cli.fit import main

__all__ = ["main"]
