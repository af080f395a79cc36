"""What may join the trials of a study: cells that are told apart from its own, and points of the
same boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_dps.core.config import folder_name
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.space_history import is_continuation
from lit_dps.core.trial import check_names
from lit_dps.storage.schema import AXES, BOXES, FORMAT_ATTR, TRIAL_SEED, UNREAD


class StudyChanged(UserError):
    """A study cannot be resumed, because its configuration, code or data have changed.

    Attributes:
        parts: The files and data that differ; empty if the configuration differs.
    """

    def __init__(self, message: str, parts: Sequence[str] = ()):
        super().__init__(message)
        self.parts = tuple(parts)


def changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """As `compare`, of two identities: data that nothing was read of are told apart where both say
    which."""
    both = UNREAD in was and UNREAD in now
    return compare(
        *({key: x for key, x in each.items() if both or key != UNREAD} for each in (was, now))
    )


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose values differ, each with both values."""
    before, after = flatten(was), flatten(now)
    pairs = {
        key: (before.get(key, "(absent)"), after.get(key, "(absent)"))
        for key in sorted(before | after)
    }
    return [f"{key} was {old!r} and is {new!r}" for key, (old, new) in pairs.items() if old != new]


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_joint(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Checks two headers of a study, or one and what is to extend it.

    Raises:
        ConfigError: for values of an axis that cells are called the same for, and for axes that one
            of them lacks.
        StudyChanged: where the box was widened in two ways, or one has points of a box that the
            other widened.
    """
    axes, others = ours.get(AXES, {}), theirs.get(AXES, {})
    if FORMAT_ATTR in ours and axes.keys() != others.keys():
        allowed = (
            f"the axes of study {name!r}, {sorted(axes)}, or another study.name: no cell "
            "would be "
            "one of both"
        )
        raise ConfigError("study.grid", sorted(others), allowed)
    check_names("study.sparsities", [*ours.get("sparsities", ()), *theirs.get("sparsities", ())])
    for key, values in others.items():
        check_names(f"study.grid.{key}", [*axes.get(key, ()), *values])
    _check_boxes(name, ours, theirs)


def check_apart(name: str, others: Iterable[str]) -> None:
    """Raises ConfigError where a new study's files would take the place of those of another study
    of the storage.

    It is refused, and not given another folder: those of the studies that are stored keep their
    names.
    """
    for other in others:
        if other != name and folder_name(other) == folder_name(name):
            raise ConfigError(
                "study.name", name, f"a name whose files go elsewhere than those of study {other!r}"
            )


def check_seeds(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises StudyChanged where one point has other seeds in the one study than in the other, by
    their headers."""
    if ours.get(TRIAL_SEED) != theirs.get(TRIAL_SEED):
        raise StudyChanged(
            f"the trials of study {name!r} are on other seeds there: one side was begun by an "
            "earlier version, which "
            "took those of the study that study.best_of names"
        )


def _check_boxes(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    one, other = ours.get(BOXES, []), theirs.get(BOXES, [])
    if not is_continuation(one, other):
        raise StudyChanged(
            f"the box of study {name!r} was widened in another way there: its points are others"
        )
    if len(one) == len(other):
        return
    shorter, boxes = (ours, other) if len(one) < len(other) else (theirs, one)
    trials, first = shorter.get("trials", 0), boxes[min(len(one), len(other))]["first"]
    if trials > first:
        raise StudyChanged(
            f"the box of study {name!r} was widened after {first} trials a cell, and one side has "
            f"{trials} in the box "
            f"as it was before: points from {first} on are others"
        )
