"""Axes and searched keys that act in no trial of a study, because other keys are off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import setting
from lit_dps.core.search_space import Box
from lit_dps.core.trial import Value

# Keys that act only if another key has a value other than these.
_LOCAL_SGD_OFF = {
    "local.workers": (1,),
    "local.outer_learning_rate": (1,),
    "local.outer_momentum": (0,),
}
_OFF_VALUES: dict[str, dict[str, tuple]] = {
    "local.steps": _LOCAL_SGD_OFF,
    "local.start": _LOCAL_SGD_OFF,
    "local.outer_nesterov": {"local.outer_momentum": (0,)},
    "trainer.gradient_clip_algorithm": {"trainer.gradient_clip_val": (None, 0)},
}


def idle_axes(
    config: Mapping[str, Any], axes: Mapping[str, Sequence[Value]], space: Mapping[str, Box]
) -> dict[str, str]:
    """Return the axes with several values, and the searched keys, that act in no trial.

    Args:
        config: The configuration of the study as plain JSON.
        axes: The values of its axes by key.
        space: Its search space.

    Returns:
        The keys that are off, as text, by idle key.
    """
    switches = dict(keys_that_are_off(config, axes, space))
    return {key: switches[key] for key in keys_that_vary(axes, space) if key in switches}


def keys_that_vary(axes: Mapping[str, Sequence[Value]], space: Iterable[str]) -> list[str]:
    """Return the axes with several values, and the searched keys."""
    varied = [key for key, values in axes.items() if len(values) > 1]
    return [*varied, *space]


def notes_on_idle_axes(
    config: Mapping[str, Any], axes: Mapping[str, Sequence[Value]], space: Mapping[str, Box]
) -> list[str]:
    """Return a note for each key of `idle_axes`."""
    notes = []
    for key, switches in idle_axes(config, axes, space).items():
        notes.append(f"{key} has no effect while {switches} is off: its values train the same")
    return notes


def keys_that_are_off(
    config: Mapping[str, Any], axes: Mapping[str, Sequence[Value]], space: Mapping[str, Box]
) -> Iterator[tuple[str, str]]:
    """Yield each key that acts in no trial, because other keys are off, and these as text."""
    # Another module may clip by itself, with the trainer's algorithm.
    is_ours = str(setting(config, "model.class_path")).startswith("lit_dps.")
    for key, off_values in _OFF_VALUES.items():
        if key.startswith("trainer.") and not is_ours:
            continue
        is_off = []
        for switch, off in off_values.items():
            values: Iterable[Any] = [fixed_value(config, switch)]
            if switch in axes:
                values = axes[switch]
            elif switch in space:
                values = space[switch].extremes
            is_off.append(all(value in off for value in values))
        if all(is_off):
            yield key, " or ".join(off_values)


def fixed_value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of the section local or trainer; its default if it is not set."""
    value: Any = setting(config, key)
    if value is None and key.startswith("local."):
        return getattr(LocalSGDSchedule(), key.removeprefix("local."))
    return value
