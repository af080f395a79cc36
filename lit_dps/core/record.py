"""StudyRecord: everything that is known of a study, as plain data, without a database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from os import PathLike
from typing import Any

from lit_dps.core.batch_schedule import BatchSchedule
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.racing import best_trial, is_final, race_limit
from lit_dps.core.repeats import RepeatPlan, missing_repeats
from lit_dps.core.search_space import Box, ExpandedSpace, short_names
from lit_dps.core.statistic import MINIMUM, Statistic, statistic_named
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.trial import (
    Cell,
    RepeatId,
    Series,
    Status,
    TrialResult,
    Value,
    last_name,
    short_name,
    text_of,
)
from lit_dps.core.trial_config import BatchConfig
from lit_dps.core.unit import EXAMPLES, STEPS, Cost, value_at

# Entry of an environment: what its trials ran on, in words. Earlier versions did not store it.
HARDWARE = "hardware"


@dataclass(frozen=True)
class StudyRecord:
    """A study: its configuration and its results so far.

    Attributes:
        name: Name of the study.
        workload: Name of the workload.
        goal: When a trial stops.
        space: Range or choices of each metaparameter by configuration key.
        batch_sizes: Batch sizes of the grid, in examples.
        sparsities: Sparsities of the grid, in [0, 1).
        trials: Number of trials of each cell: points 0 to trials - 1.
        seed: The study's seed.
        goals: Further values of the goal's metric that the same runs answer
            (`lit_dps.analysis.other_goals.at_goal`): easier ones; any, with `train_past_goal`.
        race_factor: Trials stop after this multiple of K*; None runs them to the step budget
            (`lit_dps.core.racing`).
        config: The configuration of the study.
        results: Finished trials of every cell of the grid, by point, truncated at the race limit.
            The list is empty for a cell without finished trials.
        running: Number of trials of each cell that are started or queued and are not finished.
        running_repeats: Number of repeats of each cell that are started or queued.
        axes: Values of each further axis of the grid by configuration key.
        noise: The noise scale of a short run before the first trial; None if not measured.
        train_past_goal: Whether trials continue to the step budget after they have met the goal.
        repeats: Finished repeats of every cell of the grid, by point and number. They include
            points that are not among the best any more.
        plan: Which points are repeated.
        spaces: If the search space was expanded: the first space, then each expanded one. The last
            one is `space`.
        environments: What the trials were made of, the oldest first (`lit_dps.core.environment`);
            empty if that was not stored.
        undetermined_points: Only for another goal than the study's: trials of each cell that are
            skipped, because the check at which they met that goal is unknown. By point, the cost up
            to the first check that may have met it.
        step_timing: Times of a step, measured alone at the end of the study; None if not measured.
        shared: Cells that were not trained, each with the equal cell whose trials it shows
            (`shared_cells`).
        statistic: What K* is: a number of the trials of a cell.
        notes: Notes of dry runs that weaken a number, by text: the name of a
            `lit_dps.report.notes.Level`.
        changed_samples: Cells whose samples are no longer the best ones of the study in
            `study.best_of`, for reports. Only if the same storage has that study.
    """

    name: str
    workload: str
    goal: Goal
    space: dict[str, Box]
    batch_sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    trials: int
    seed: int
    goals: tuple[float, ...]
    race_factor: float | None
    config: dict
    results: dict[Cell, list[TrialResult]]
    running: dict[Cell, int]
    running_repeats: Mapping[Cell, int] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    noise: NoiseScale | None = None
    train_past_goal: bool = False
    repeats: Mapping[Cell, list[TrialResult]] = field(default_factory=dict)
    plan: RepeatPlan = RepeatPlan()
    spaces: tuple[ExpandedSpace, ...] = ()
    environments: tuple[Mapping[str, Any], ...] = ()
    undetermined_points: Mapping[Cell, Mapping[int, Cost]] = field(default_factory=dict)
    step_timing: StepTiming | None = None
    shared: Mapping[Cell, Cell] = field(default_factory=dict)
    statistic: Statistic = MINIMUM
    notes: Mapping[str, str] = field(default_factory=dict)
    changed_samples: frozenset[Cell] = frozenset()

    @property
    def cells(self) -> list[Cell]:
        """All cells of the grid, by series, then batch size."""
        return grid(self.batch_sizes, self.sparsities, self.axes)

    @property
    def trained_cells(self) -> list[Cell]:
        """The cells whose trials are trained; the others show those of an equal cell."""
        return [cell for cell in self.cells if cell not in self.shared]

    @property
    def hardware(self) -> list[str | None]:
        """What the trials ran on, each once, the oldest first; None for trials without it."""
        return list(dict.fromkeys(each.get(HARDWARE) for each in self.environments))

    @property
    def series(self) -> list[Series]:
        """The curves of the grid, sorted."""
        return sorted({cell.series for cell in self.cells})

    def results_without_failed(self, cell: Cell) -> list[TrialResult]:
        """Return the results of a cell without failed trials, which will run again."""
        return [result for result in self.results[cell] if result.status is not Status.FAILED]

    def k_star(self, cell: Cell) -> Cost | None:
        """Return K* of a cell by its finished trials, in its unit; None if too few are complete."""
        return self.statistic.k_star(result.cost for result in self.results.get(cell, ()))

    def k_star_steps(self, cell: Cell) -> Cost | None:
        """Return K* of a cell in steps: the steps of its trial if its unit is another one."""
        best = best_trial(self.results.get(cell, ()), self.statistic)
        if best is None or best.unit is STEPS:
            return self.k_star(cell)
        return best.steps

    def batch_schedule(self, series: Series) -> BatchSchedule:
        """Return the batch size of a series as a function of the step."""
        return self._batch_schedules[series]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics of the curves: that of the goal, and further ones."""
        further: Any = self.setting("study.metrics") or ()
        return (self.goal.metric, *further)

    def spent_at(self, result: TrialResult, column: str, step: float) -> float | None:
        """Return the examples or seconds that a trial has counted up to a check; None without.

        Args:
            result: The trial.
            column: `Unit.column`. A metric of this name is no count.
            step: Of the check.
        """
        if column in self.metrics:
            return None
        return value_at(result.curve, column, step)

    def has_constant_batch(self, cell: Cell) -> bool:
        """Return True if every step of a cell's trials has its batch size."""
        return self.batch_schedule(cell.series).is_constant

    @cached_property
    def _batch_schedules(self) -> dict[Series, BatchSchedule]:
        section: Any = self.setting("batch") or {}
        config = BatchConfig(**section)
        return {series: config.with_axes(series.axes).build() for series in self.series}

    def examples_of(self, cell: Cell, steps: float, result: TrialResult | None = None) -> float:
        """Return the training examples of the first steps of a trial.

        Args:
            cell: The cell of the trial.
            steps: Number of steps.
            result: The trial. If it has counted its examples up to a check at this step, this count
                is returned. Otherwise each step has the size that the study sets.
        """
        counted = None
        if result is not None:
            counted = self.spent_at(result, EXAMPLES.column, steps)
        if counted is not None:
            return int(counted)
        return self.batch_schedule(cell.series).examples_of(steps, cell.batch_size)

    def with_statistic(self, name: str) -> StudyRecord:
        """Return the study as if K* had been another statistic of the same trials.

        Args:
            name: As in `study.statistic`.

        Raises:
            ConfigError: if racing stopped trials before they could no longer change the statistic.
        """
        statistic = statistic_named(name)
        if statistic.name == self.statistic.name:
            return self
        key = "--statistic"
        if self.goals and self.race_factor is not None:
            allowed = f"{self.statistic.name}, because the study has further goals and racing"
            raise ConfigError(key, name, allowed)
        if self.trials < statistic.needed_trials:
            allowed = (
                f"a statistic of at most {self.trials} trials, because each cell has {self.trials}"
            )
            raise ConfigError(key, name, allowed)
        cells = [cell for cell in self.results if not self._determines(cell, statistic)]
        if cells:
            allowed = (
                "a statistic that the stored trials determine. Racing stopped trials too "
                f"early in {len(cells)} of {len(self.results)} cells, such as "
                f"{cell_text(cells[0])}"
            )
            raise ConfigError(key, name, allowed)
        return replace(self, statistic=statistic)

    def _determines(self, cell: Cell, statistic: Statistic) -> bool:
        """Return True if no trial that was stopped early can change a statistic of a cell."""
        results = self.results[cell]
        limit = race_limit((result.cost for result in results), 1.0, statistic)
        return all(is_final(result, limit) for result in results)

    def missing_repeats(self, cell: Cell) -> list[RepeatId]:
        """Return the repeats of a cell that must still run, as (point, number)."""
        results = self.results.get(cell, ())
        return missing_repeats(self.plan, results, self.repeats.get(cell, ()), self.statistic)

    def setting(self, key: str) -> object:
        """Return a value of the configuration by its dotted key; None if there is no such key."""
        return setting(self.config, key)

    @property
    def k_star_words(self) -> str:
        """What K* is, as in "the fewest steps of any trial"."""
        return self.statistic.describe_in(self.goal.cost_unit)

    @property
    def short_names(self) -> dict[str, str]:
        """The short name of each searched metaparameter, by its key."""
        return short_names(list(self.space))

    @property
    def named_space(self) -> dict[str, Box]:
        """The search space by short names."""
        return {name: self.space[key] for key, name in self.short_names.items()}

    @property
    def space_text(self) -> str:
        """The search space in one line, with short names."""
        return self.text_of_space(self.space)

    def text_of_space(self, space: Mapping[str, Box]) -> str:
        """Return a search space of the study in one line, with short names."""
        return "; ".join(f"{self.short_names[key]} {box}" for key, box in space.items())

    def subset(self, sparsities: Iterable[float], batch_sizes: Iterable[int]) -> StudyRecord:
        """Return the part of the study at some of its sparsities and batch sizes."""
        kept_sparsities = tuple(sparsities)
        kept_batch_sizes = tuple(batch_sizes)
        results = {}
        running = {}
        running_repeats = {}
        repeats = {}
        for cell in self.results:
            if cell.sparsity in kept_sparsities and cell.batch_size in kept_batch_sizes:
                results[cell] = self.results[cell]
                running[cell] = self.running[cell]
                running_repeats[cell] = self.running_repeats.get(cell, 0)
                repeats[cell] = self.repeats[cell]
        return replace(
            self,
            sparsities=kept_sparsities,
            batch_sizes=kept_batch_sizes,
            results=results,
            running=running,
            running_repeats=running_repeats,
            repeats=repeats,
        )

    def parse_cell(self, text: str) -> Cell:
        """Return the cell of a text such as "B=32,S=0.9,delay=4", as `cell_text` writes it.

        Axes are named by their keys or by their last names. An axis with one value is optional.

        Raises:
            ConfigError: for a text that names no cell of the grid, or several.
        """
        axes: dict[str, tuple[Value, ...]] = {
            "B": self.batch_sizes,
            "S": self.sparsities,
            **self.axes,
        }
        allowed = "; ".join(map(_axis_text, axes, axes.values()))
        keys = dict(zip(map(short_name, axes), axes, strict=True))
        keys |= dict(zip(axes, axes, strict=True))
        chosen: dict[str, Value] = {}
        # A value may have blanks: schedule=0:B/4 2.5%:B.
        for part in _BEFORE_NAME.split(text.strip(" ")):
            name, _, value_text = part.partition("=")
            key = keys.get(name, "")
            value = _parse_value(value_text, axes.get(key, ()))
            if value is None:
                raise ConfigError("--cell", text, f"a cell of study {self.name}: {allowed}")
            if key in chosen:
                raise ConfigError("--cell", text, f"one value each of {allowed}")
            chosen[key] = value
        for key, values in axes.items():
            if len(values) == 1:
                chosen.setdefault(key, values[0])
        if chosen.keys() != axes.keys():
            raise ConfigError("--cell", text, f"one value each of {allowed}")
        batch_size = int(chosen.pop("B"))
        sparsity = float(chosen.pop("S"))
        return Cell(batch_size, sparsity, tuple(sorted(chosen.items())))


# One comma, because the value before it may be a comma.
_BEFORE_NAME = re.compile(r"(?:,\s*|\s+)(?=[^\W\d][\w.]*=)")


def _axis_text(key: str, values: Iterable[Value]) -> str:
    """Return an axis and its values, such as "delay=0|4"."""
    return f"{short_name(key)}={'|'.join(map(text_of, values))}"


def _parse_value(text: str, values: Iterable[Value]) -> Value | None:
    """Return the value of an axis that a text means: by its text, else by its number."""
    for value in values:
        if text in (str(value), text_of(value), last_name(value)):
            return value
    try:
        number = float(text)
    except ValueError:
        return None
    return next((value for value in values if value == number), None)


def cell_text(cell: Cell) -> str:
    """Return a cell as a command takes it: B=32,S=0.9,delay=4."""
    return ",".join([f"B={cell.batch_size}", *cell.series.names])


def grid(
    batch_sizes: Iterable[int],
    sparsities: Iterable[float],
    axes: Mapping[str, Iterable[Value]] | None = None,
) -> list[Cell]:
    """Return all cells, by sparsity, then values of the further axes, then batch size."""
    axes = dict(sorted((axes or {}).items()))
    cells = []
    for sparsity in sorted(sparsities):
        for values in product(*map(sorted, axes.values())):
            axis_values = tuple(zip(axes, values, strict=True))
            for batch_size in sorted(batch_sizes):
                cells.append(Cell(batch_size, sparsity, axis_values))
    return cells


def remaining_points(
    cells: Iterable[Cell], trials: int, results: Mapping[Cell, Iterable[TrialResult]]
) -> dict[Cell, set[int]]:
    """Return the points of each cell that the next run of the study must train.

    They have no result, or failed. For a run that has begun, a failed trial has ended
    (`lit_dps.study.progress.Progress.finished`), and so has it for the report
    (`lit_dps.analysis.summary.CellSummary.pending`): only another run retries it.

    Args:
        cells: The cells.
        trials: The number of trials of each cell.
        results: Results of some cells, truncated at the race limit.
    """
    remaining = {}
    for cell in cells:
        remaining[cell] = set(range(trials))
        for result in results.get(cell, ()):
            if result.status is not Status.FAILED:
                remaining[cell].discard(result.trial.point)
    return remaining


def shared_cells(
    cells: Iterable[Cell], results: Mapping[Cell, Sequence[TrialResult]] = {}
) -> dict[Cell, Cell]:
    """Return for each cell that is not trained the equal cell whose trials it shows.

    Nothing is pruned at sparsity 0, so dense cells that differ in keys of `pruning` alone are
    equal. The first one of the grid is trained; in a stored study, the one with the most results.
    The grid of a study may grow by a cell that precedes it.

    Args:
        cells: The grid.
        results: The stored results of the cells.
    """
    equal_cells: dict[tuple, list[Cell]] = {}
    for cell in cells:
        if cell.sparsity == 0:
            key = (cell.batch_size, cell.stack_axes)
            equal_cells.setdefault(key, []).append(cell)
    shared = {}
    for equal in equal_cells.values():
        trained = max(equal, key=lambda cell: len(results.get(cell, ())))
        for cell in equal:
            if cell != trained:
                shared[cell] = trained
    return shared


def setting(config: Mapping, key: str) -> object:
    """Return a value of a study's configuration by its dotted key; None if there is no such key."""
    node: object = config
    for name in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


def check_is_record(value: object, name: str) -> None:
    """Raise TypeError, with what to pass instead, unless a value is a `StudyRecord`.

    Args:
        value: An argument of a user's call.
        name: The class that is called, such as "Analysis".
    """
    if isinstance(value, StudyRecord):
        return
    kind = type(value).__name__
    if isinstance(value, (str, PathLike)):
        advice = f"lit_dps.load({str(value)!r}) reads a study by its name"
    elif kind == "Study":
        advice = "pass study.analysis.record"
    elif kind == "Analysis":
        advice = "pass analysis.record"
    else:
        advice = "lit_dps.load(NAME) reads a study by its name"
    raise TypeError(f"{name} takes a StudyRecord, not {kind}; {advice}")
