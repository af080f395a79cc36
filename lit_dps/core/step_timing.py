"""StepTiming: seconds of a training step in each cell, measured after the last trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_dps.core.search_space import RATE_NAMES, Box, Choices, Space
from lit_dps.core.trial import Cell, Trial, Value


@dataclass(frozen=True)
class CellTiming:
    """Times of one cell.

    Attributes:
        cell: The cell.
        steps: Seconds of a training step, one mean for each round.
        check: Seconds of one validation of the entire split; median over the rounds.
        params: Metaparameters of the trial that was timed; earlier versions stored none.
    """

    cell: Cell
    steps: tuple[float, ...]
    check: float
    params: Mapping[str, Value] = field(default_factory=dict)


# Arguments that are lengths of a schedule.
_LENGTHS = ("warmup_steps", "decay_steps", "max_steps", "warmup_epochs", "decay_epochs")


def sizes_of(params: Mapping[str, Value], space: Space) -> dict[str, Value | None]:
    """Return the metaparameters that may change the time of a step.

    Choices and whole numbers may set the size of a network, such as its width. Other numbers, such
    as a learning rate or a dropout, do not change the time of a step, nor do lengths of a schedule
    (`_LENGTHS`).
    """
    return {key: params.get(key) for key, box in space.items() if _may_be_size(key, box)}


def _may_be_size(key: str, box: Box) -> bool:
    """Return True if the values of a metaparameter may change the time of a step."""
    name = key.rpartition(".")[2]
    if name in RATE_NAMES or name in _LENGTHS:
        return False
    if isinstance(box, Choices):
        # A list such as [0, 0.5] is of shares, although 0 is a whole number.
        return not all(isinstance(value, float) or value == 0 for value in box.choices)
    return box.integer


@dataclass(frozen=True)
class StepTiming:
    """Times of the cells of a study, with the conditions under which they were measured.

    Attributes:
        machine: Processor, cores and GPUs, as `lit_dps.study.hardware.hardware` describes them.
        date: UTC date of the measurement, YYYY-MM-DD.
        threads: CPU threads of the process that trained.
        ranks: Processes that trained each trial together.
        cells: The measurements.
        environment: Key of the environment of the measurement
            (`lit_dps.core.environment.Environment.code_key`); None if an earlier version measured.
    """

    machine: str
    date: str
    threads: int
    ranks: int
    cells: tuple[CellTiming, ...]
    environment: str | None = None

    @property
    def by_cell(self) -> dict[Cell, CellTiming]:
        """The measurements by cell."""
        return {timing.cell: timing for timing in self.cells}

    @property
    def conditions(self) -> tuple[str, int, int]:
        """Machine, threads and ranks: times under other conditions are not comparable."""
        return self.machine, self.threads, self.ranks

    @property
    def rounds(self) -> int:
        """Number of rounds of the measurement."""
        return max((len(timing.steps) for timing in self.cells), default=0)

    def covers(self, cells: Iterable[Cell]) -> bool:
        """Return True if each of the cells was measured."""
        return set(cells) <= self.by_cell.keys()

    def is_of(self, trials: Iterable[Trial], space: Space) -> bool:
        """Return True if each trial's cell was timed with the sizes of the trial (`sizes_of`).

        Args:
            trials: The best trials of the cells.
            space: The search space.
        """
        timings = self.by_cell
        for trial in trials:
            if trial.cell not in timings:
                return False
            if sizes_of(timings[trial.cell].params, space) != sizes_of(trial.params, space):
                return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        cells = []
        for timing in self.cells:
            cells.append(
                {
                    **asdict(timing.cell),
                    "axes": dict(timing.cell.axes),
                    "steps": list(timing.steps),
                    "check": timing.check,
                    "params": dict(timing.params),
                }
            )
        return {**asdict(self), "cells": cells}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> StepTiming:
        """Return the times from the output of `to_dict`.

        Raises:
            KeyError, TypeError or AttributeError: for any other input.
        """
        cells = []
        for row in stored["cells"]:
            others = tuple(sorted(row["axes"].items()))
            cell = Cell(row["batch_size"], row["sparsity"], others)
            params = row.get("params", {})
            cells.append(CellTiming(cell, tuple(row["steps"]), row["check"], params))
        return cls(
            machine=stored["machine"],
            date=stored["date"],
            threads=stored["threads"],
            ranks=stored["ranks"],
            cells=tuple(cells),
            environment=stored.get("environment"),
        )
