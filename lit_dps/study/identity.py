"""Parts of a configuration written so that those of earlier versions, and other ways to say the same, are equal."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lit_dps.goal import ERROR
from lit_dps.module import ImageClassifier

# Arguments of ImageClassifier that studies of earlier versions were declared without
_ADDED = ("beta1", "beta2", "epsilon", "weight_decay")


def goal_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The goal, alike for all ways to write it; a validation error as before there were other metrics."""
    found = {key: value for key, value in given.items() if key != "early_reject" and value is not None}
    if "metric" in found:
        found["monitor"] = found.pop("metric")
    if 0 < found.get("at_most", 0) < 1 and found["monitor"] == ERROR:
        found["error"] = found.pop("at_most")
    return found


def added_arguments(class_path: str) -> dict[str, Any]:
    """The arguments that a module class has from ImageClassifier since a later version, with their defaults."""
    module, _, name = class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, ImageClassifier)):
        return {}
    own = {} if kind.__init__ is ImageClassifier.__init__ else inspect.signature(kind.__init__).parameters
    defaults = inspect.signature(ImageClassifier.__init__).parameters
    return {name: defaults[name].default for name in _ADDED if name not in own}
