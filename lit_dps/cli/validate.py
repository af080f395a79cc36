"""validate: evaluate a checkpoint of `fit` on the validation split."""

from lit_dps.cli.fit import main

__all__ = ["main"]
