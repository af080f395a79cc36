"""StudyRecord: all that is known of a study, as plain data. What reads it needs no database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Box
from lit_dps.core.space_history import ExpandedSpace
from lit_dps.core.step_timing import StepTiming
from lit_dps.core.trial import Cell, Series, Status, TrialResult, Value, short_name, text_of

# of an environment: what its trials ran on, in words; absent in those of earlier versions
HARDWARE = "hardware"


@dataclass(frozen=True)
class StudyRecord:
    """All that a study knows: what it set out to do and what has been found so far.

    Attributes:
        name: Name of the study.
        workload: Name of the workload.
        goal: When a trial stops.
        space: Range or choices of each metaparameter by configuration key.
        batch_sizes: Batch sizes of the grid, in examples.
        sparsities: Sparsities of the grid, in [0, 1).
        trials: Trials declared for each cell: points 0 to trials - 1.
        seed: The study's seed.
        goals: Further values of the goal's metric that the same runs answer
            (`lit_dps.analysis.other_goals.at_goal`): easier ones; with run_on any.
        slack: How far beyond K* trials run, as a multiple of it; None to the step budget
            (`lit_dps.core.racing`).
        config: The configuration it was started with.
        results: Finished trials of every cell of the grid, by point, as they stood at step slack x
            K*; an empty list where none has.
        running: Trials and repeats of each cell that are started or queued and not yet finished.
        repeats: Finished repeats of every cell of the grid, by point and number, also of points
            that are not among its best any more.
        plan: What was asked to be repeated.
        boxes: Where the box was widened, its history: as it was at first, and each that followed;
            `space` is the last.
        axes: Values of each further axis of the grid by configuration key.
        noise: The noise scale of a short run before the first trial; None without one.
        environments: What its trials were made of, the oldest first (`lit_dps.core.environment`);
            empty where that was not kept.
        run_on: Whether trials that met their goal went on to the step budget.
        step_timing: Times of a step that were measured alone, at the end of the study; None without
            them.
        untold: At another goal than the study's own, of each cell the trials that are left out, as
            nobody can tell when they met it: by point, the step of the first check at which it may
            have.
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
    slack: float | None
    config: dict
    results: dict[Cell, list[TrialResult]]
    running: dict[Cell, int]
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    noise: NoiseScale | None = None
    run_on: bool = False
    repeats: Mapping[Cell, list[TrialResult]] = field(default_factory=dict)
    plan: RepeatPlan = RepeatPlan()
    boxes: tuple[ExpandedSpace, ...] = ()
    environments: tuple[Mapping[str, Any], ...] = ()
    undetermined_points: Mapping[Cell, Mapping[int, int]] = field(default_factory=dict)
    step_timing: StepTiming | None = None

    @property
    def cells(self) -> list[Cell]:
        """The grid, by series, then batch size."""
        return grid(self.batch_sizes, self.sparsities, self.axes)

    @property
    def hardware(self) -> list[str | None]:
        """What its trials ran on, each once, the first first; None for trials of a version that did
        not keep it."""
        return list(dict.fromkeys(each.get(HARDWARE) for each in self.environments))

    @property
    def series(self) -> list[Series]:
        """The curves of the grid, sorted."""
        return sorted({cell.series for cell in self.cells})

    def resolved_results(self, cell: Cell) -> list[TrialResult]:
        """The results of a cell but for failed trials: how those would have ended is not known, and
        they run again."""
        return [result for result in self.results[cell] if result.status is not Status.FAILED]

    def cell_named(self, text: str) -> Cell:
        """The cell of a text such as "B=32,S=0.9,delay=4", as `cell_text` and `str(Cell)` have it.

        Axes are named by their keys or by their last names; one of a single value may be left out.

        Raises:
            ConfigError: for a text that names no cell of the grid, or several.
        """
        axes: dict[str, tuple[Value, ...]] = {
            "B": self.batch_sizes,
            "S": self.sparsities,
            **self.axes,
        }
        named = {short_name(key): key for key in axes} | {key: key for key in axes}
        allowed = "; ".join(
            f"{short_name(key)}={'|'.join(map(text_of, values))}" for key, values in axes.items()
        )
        found = {key: values[0] for key, values in axes.items() if len(values) == 1}
        for part in text.replace(",", " ").split():
            name, _, value = part.partition("=")
            key = named.get(name, "")
            match = next(
                (each for each in axes.get(key, ()) if value in (str(each), text_of(each))), None
            )
            if match is None:
                match = next((each for each in axes.get(key, ()) if _number(value) == each), None)
            if match is None:
                raise ConfigError("--cell", text, f"a cell of study {self.name}: {allowed}")
            found[key] = match
        if found.keys() != axes.keys():
            raise ConfigError("--cell", text, f"one value each of {allowed}")
        return Cell(found.pop("B"), found.pop("S"), tuple(sorted(found.items())))


def cell_text(cell: Cell) -> str:
    """A cell as a command takes it: B=32,S=0.9,delay=4."""
    return str(cell).replace(" ", ",")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def grid(
    batch_sizes: Iterable[int],
    sparsities: Iterable[float],
    axes: Mapping[str, Iterable[Value]] | None = None,
) -> list[Cell]:
    """All cells, by sparsity, values of the further axes, then batch size."""
    axes = dict(sorted((axes or {}).items()))
    others = [
        tuple(zip(axes, values, strict=True)) for values in product(*map(sorted, axes.values()))
    ]
    return [
        Cell(b, s, other)
        for s in sorted(sparsities)
        for other in others
        for b in sorted(batch_sizes)
    ]


def setting(config: Mapping, key: str) -> object:
    """Return a value of a study's configuration by its dotted key; None if there is no such key."""
    node: object = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
