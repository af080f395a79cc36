"""Trials of the dry run: one for each value of an axis or a choice, and trials in other cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Trial, Value
from lit_dps.study.setup import StudySetup


def with_cell(trial: Trial, **changes: Any) -> Trial:
    """Return a trial in another cell, such as `with_cell(trial, sparsity=0.0)`."""
    return replace(trial, cell=replace(trial.cell, **changes))


def smallest_trials(setup: StudySetup) -> list[Trial]:
    """Return a trial of each combination of axis values, at the smallest batch size.

    All have the largest sparsity and the first sample of the search.
    """
    study = setup.study
    smallest, sparsity = min(study.batch_sizes), max(study.sparsities)
    cells = dict.fromkeys(Cell(smallest, sparsity, cell.axes) for cell in study.cells)
    return [Trial(cell, 0, setup.sample(0), study.seed) for cell in cells]


def trials_with_each_value(setup: StudySetup, sections: Sequence[str] = ()) -> list[Trial]:
    """Return few trials that together have each value of each axis and of each choice.

    Their number is the length of the longest list of values, not the product of the lengths. All
    have the smallest batch size, the largest sparsity and the first sample of the search.

    Args:
        setup: The study.
        sections: The sections whose values vary, such as "data"; empty for all of them.
    """
    study = setup.study
    choices: dict[str, list[Value]] = {}
    for key, box in study.space.items():
        if isinstance(box, Choices) and _is_in(key, sections):
            choices[key] = list(box.choices)
    axes = {key: list(values) for key, values in study.axes.items()}
    for key in axes:
        if not _is_in(key, sections):
            axes[key] = axes[key][:1]
    trials = []
    for number in range(max(map(len, [[None], *axes.values(), *choices.values()]))):
        cell = Cell(
            min(study.batch_sizes), max(study.sparsities), tuple(_values_at(axes, number).items())
        )
        params: dict[str, Any] = {**setup.sample(0), **_values_at(choices, number)}
        trials.append(Trial(cell, 0, params, study.seed))
    return trials


def trials_with_each_choice(setup: StudySetup, trial: Trial) -> list[Trial]:
    """Return a trial, and copies of it with each other choice of the search, one at a time."""
    trials = [trial]
    for key, box in setup.study.space.items():
        if isinstance(box, Choices):
            for choice in box.choices:
                if choice != trial.params[key]:
                    trials.append(replace(trial, params={**trial.params, key: choice}))
    return trials


def _is_in(key: str, sections: Sequence[str]) -> bool:
    return not sections or key.partition(".")[0] in sections


def _values_at(values_by_key: dict[str, list[Value]], number: int) -> dict[str, Value]:
    """Return a value of each key. A shorter list begins again at its end."""
    return {key: values[number % len(values)] for key, values in values_by_key.items()}
