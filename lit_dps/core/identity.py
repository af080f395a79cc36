"""One spelling of the identity of a study, whichever way its configuration is written.

New and stored identities are spelled before they are compared, so stored studies stay the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from lit_dps.core.batch_schedule import CONSTANT, NAME_KEY, SCHEDULES
from lit_dps.core.goal import RULES, SINGLE_CHECK
from lit_dps.core.registry import name_of_class
from lit_dps.core.user_code import texts_in

# The module of classes without an importable path. It exists in one process only.
OBJECTS = "lit_dps_objects"
# Begin the paths of classes that only the process of the script or notebook can import.
LOCAL = ("__main__.", f"{OBJECTS}.")

# Sections whose options can be axes of the grid.
_WITH_OPTIONS = ("pruning", "batch")


def local_classes(config: Any) -> list[str]:
    """Return the paths in a configuration that only the script or notebook can import."""
    return sorted({text for text in texts_in(config) if text.startswith(LOCAL)})


def one_spelling(identity: Mapping[str, Any], axes: Iterable[str]) -> dict[str, Any]:
    """Return an identity in which equal studies are equal.

    Options that an axis sets are left out. A class has its name in the package, or else the class
    path of the module that defines it.

    Args:
        identity: As `lit_dps.study.identity.identity_of_study` returns it, or as stored.
        axes: Keys of the axes of the grid.
    """
    spelled: dict[str, Any] = copy.deepcopy(dict(identity))
    for key in axes:
        section, _, option = key.partition(".options.")
        if section in _WITH_OPTIONS and option:
            options = spelled.get(section, {}).get("options") or {}
            options.pop(option, None)
    for section in _WITH_OPTIONS:
        if not spelled.get(section, {}).get("options", True):
            del spelled[section]["options"]
    _name_class(spelled, "goal.rule", RULES, SINGLE_CHECK)
    _name_class(spelled, NAME_KEY, SCHEDULES, CONSTANT)
    _name_class(spelled, "study.statistic", {})
    readings = spelled.get("study", {}).get("readings", [])
    for reading in readings:
        reading["class_path"] = name_of_class(reading["class_path"], {})
    readings.sort(key=repr)
    if not spelled.get("batch", True):
        del spelled["batch"]
    return spelled


def _name_class(
    spelled: dict[str, Any], key: str, built_in: Mapping[str, Any], default: str | None = None
) -> None:
    """Spell the name of a class in a section; the default is left out."""
    section, _, name = key.partition(".")
    values = spelled.get(section, {})
    if name in values:
        values[name] = name_of_class(values[name], built_in)
        if values[name] == default:
            del values[name]
