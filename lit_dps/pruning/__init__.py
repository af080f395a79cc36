"""Pruning at initialization: methods by name, one file each, and the mask that they give.

To add one: a file beside `snip.py`, and its class in `PRUNERS`. Somebody else's goes by its class path.
"""

from collections.abc import Mapping
from typing import Any

from lit_dps.errors import ConfigError
from lit_dps.plugins import named
from lit_dps.pruning.magnitude import Magnitude
from lit_dps.pruning.mask import Mask, prunable
from lit_dps.pruning.network import Network, gradient_sum
from lit_dps.pruning.pruner import OneShot, Pruner, prune, top_k, worth_knowing
from lit_dps.pruning.random import Random
from lit_dps.pruning.snip import Snip, signed_saliency

PRUNERS: dict[str, type[Pruner]] = {"snip": Snip, "magnitude": Magnitude, "random": Random}


def pruner_of(method: str, options: Mapping[str, Any] | None = None) -> Pruner:
    """The pruning method of a name or class path, with these options of its constructor.

    Raises:
        ConfigError: if there is none, or it does not take the options.
    """
    kind = named("pruning.method", method, PRUNERS, "Pruner", lambda f: isinstance(f, type) and issubclass(f, Pruner))
    try:
        return kind(**(options or {}))
    except TypeError as error:
        raise ConfigError("pruning.options", dict(options or {}), f"what {method} takes: {error}") from error


__all__ = [
    *("PRUNERS", "Mask", "Network", "OneShot", "Pruner", "gradient_sum", "prunable", "prune", "pruner_of"),
    *("signed_saliency", "top_k", "worth_knowing"),
]
