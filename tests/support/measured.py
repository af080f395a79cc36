"""What a fit measures of the theory's terms."""

from __future__ import annotations

from lit_dps.core.trial import THEORY
from lit_dps.readings import ReadingsCallback


def lipschitz(**arguments) -> ReadingsCallback:
    """A callback that reads the Lipschitz constant."""
    return ReadingsCallback([{"class_path": "lipschitz", "init_args": arguments}])


def terms_of(measured: ReadingsCallback) -> dict[str, float]:
    """The terms of the theory that a callback has read, by name."""
    return {name.removeprefix(THEORY): value for name, value in measured.flags.items()}
