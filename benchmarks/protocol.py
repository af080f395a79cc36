"""Cells by the paper's protocol, and by studies with racing, early checks and the lean loop: the
same K*, sooner.

Ours runs whole. The paper's is extrapolated from measured steps and checks
(`benchmarks.paper_cost`).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.numbers import Bounds
from benchmarks.options import Options
from benchmarks.paper_cost import (
    Cost,
    Paper,
    evenly,
    paper_steps,
    run_as_paper,
    run_to_end,
    same_end,
    time_trial,
)
from benchmarks.pool import Apply, pool
from benchmarks.raced import run_raced, short_sample
from benchmarks.setups import middle_trial, paper_setup, varied
from benchmarks.text import NO_GPU, between, ratio, seconds, table
from lit_dps.core.search_space import short_names
from lit_dps.core.text import format_duration
from lit_dps.core.trial import Status, TrialResult, Value
from lit_dps.study.setup import StudySetup

TITLE = "The paper's protocol and ours"
CHECKS = (
    12  # of each trial that the paper's steps and checks are timed in, before ours and after it
)

OURS = (
    "Ours: `study.race_factor 1`, `goal.early_reject true`, `study.engine {}`; "
    "a whole study of each cell "
    "by the wall clock, from the check of its configuration to its figures, run once."
)
PAPERS = (
    "The paper's: no race, full checks, Lightning's own loop; with memory given back to the "
    "system when it is freed, "
    "as PyTorch does by default, and kept, the one saving of ours that it then has too. "
    "**Extrapolated**: its trials, "
    "steps and checks times the seconds of each, which were measured before ours and after it "
    "with as many trials at a "
    "time; shared evenly by the workers, without their start, storage, table and figures. The "
    "steps of outraced trials "
    "are not known. At least: as many as the race let them run. At most: the budget. Estimate: "
    "the mean of those that "
    "ran to their end afterwards."
)
BOTH = (
    "Trials that ran both ways, the paper's as far as ours went; an outraced trial is the same if "
    "it had not met the "
    "goal by then:"
)


@dataclass(frozen=True)
class End:
    """How a trial ended, and after how many steps."""

    point: int
    status: str
    steps: int

    def __str__(self) -> str:
        return f"{self.status} after {self.steps:,} steps"


@dataclass(frozen=True)
class Both:
    """A trial that ran both ways: ours, and the paper's as far as ours went."""

    ours: End
    paper: End
    same: bool


@dataclass(frozen=True)
class CellFound:
    """One cell.

    Attributes:
        batch_size: Examples a step.
        k_star: K*, or None.
        best: The metaparameters of the K* trial; empty without one.
        counts: Trials by how they ended in ours.
        ours_seconds: Wall time of the whole study: start of the workers, trials, storage, table and
            figures.
        paper_steps: Steps under the paper's protocol; at least those of ours.
        paper: That protocol with none of our savings.
        kept: The same where freed memory is kept.
        calibrated: Outraced trials that were run to their end.
        both: Trials that were run both ways.
    """

    batch_size: int
    k_star: int | None
    best: dict[str, Value]
    counts: dict[str, int]
    ours_seconds: float
    paper_steps: Bounds
    paper: Paper
    kept: Paper
    calibrated: tuple[End, ...]
    both: tuple[Both, ...]


@dataclass(frozen=True)
class Protocol:
    """All cells, dense."""

    workload: str
    engine: str
    goal_error: float
    check_interval: int
    max_steps: int
    workers: int
    cells: tuple[CellFound, ...]
    ratio: Bounds
    ratio_kept: Bounds


def measure(options: Options) -> Protocol:
    """Each cell as a study of its own, between two timings of the paper's steps and checks."""
    goal = {"error": options.goal_error, "max_steps": options.max_steps, "early_reject": True}
    study = {"sparsities": [0.0], "race_factor": 1.0}
    setup = varied(paper_setup(options.quick), goal=goal, **study)
    if options.quick:
        setup = varied(setup, workers=1)
    size = setup.workers, setup.study.threads
    with pool(*size) as kept, pool(*size, keep=False) as plain:
        cells = [
            _cell(
                varied(setup, batch_sizes=[b], trials=options.at(b, options.trials)),
                kept,
                plain,
                options,
            )
            for b in options.batch_sizes
        ]
    ours, zero = sum(cell.ours_seconds for cell in cells), Bounds(0, 0, 0)
    total, total_kept = (
        sum((p.seconds for p in ps), zero).over(ours)
        for ps in zip(*map(_papers, cells), strict=True)
    )
    measured = setup.built_goal
    sizes = (measured.value, measured.check_interval, measured.max_steps, setup.workers)
    return Protocol(
        setup.workload_name(), setup.study.engine, *sizes, tuple(cells), total, total_kept
    )


def _cell(setup: StudySetup, kept: Apply, plain: Apply, options: Options) -> CellFound:
    [cell], goal, workers = setup.cells, setup.built_goal, setup.workers
    timed = [
        (setup, middle_trial(setup, cell, i), 2 if options.quick else CHECKS)
        for i in range(workers)
    ]
    before = [apply(time_trial, timed) for apply in (plain, kept)]
    with tempfile.TemporaryDirectory() as folder:
        ours_seconds, results = run_raced(varied(setup, folder), cell)
    after = [apply(time_trial, timed) for apply in (plain, kept)]
    chosen = evenly(
        [r for r in results if r.status is Status.OUTRACED],
        options.at(cell.batch_size, options.calibrate),
    )
    calibrated = kept(run_to_end, [(setup, result.trial) for result in chosen])
    sample = short_sample(results, options.sample)
    whole = kept(run_as_paper, [(setup, result.trial, result.steps_run) for result in sample])

    steps = paper_steps(results, goal.max_steps, calibrated)
    costs = [Cost.of([*first, *last]) for first, last in zip(before, after, strict=True)]
    shares = len(results), steps, goal.check_interval, workers
    papers = [Paper.of(cost, cost.bounds(*shares), ours_seconds) for cost in costs]
    k_star = min((r.steps for r in results if r.steps is not None), default=None)
    return CellFound(
        batch_size=cell.batch_size,
        k_star=k_star,
        best=next(
            (dict(r.trial.params) for r in results if r.steps is not None and r.steps == k_star), {}
        ),
        counts=dict(Counter(str(r.status) for r in results)),
        ours_seconds=ours_seconds,
        paper_steps=steps,
        paper=papers[0],
        kept=papers[1],
        calibrated=tuple(map(_end, calibrated)),
        both=tuple(
            Both(_end(r), _end(w), same_end(r, w)) for r, w in zip(sample, whole, strict=True)
        ),
    )


def _papers(cell: CellFound) -> tuple[Paper, Paper]:
    return cell.paper, cell.kept


def _end(result: TrialResult) -> End:
    return End(result.trial.point, str(result.status), result.steps_run)


def verify(found: Protocol) -> None:
    """Raises AssertionError unless every trial that ran both ways ended alike."""
    different = [
        (cell.batch_size, both) for cell in found.cells for both in cell.both if not both.same
    ]
    if different:
        raise AssertionError(f"trials that end otherwise under the paper's protocol: {different}")


def show(found: Protocol) -> str:
    """Ours, the paper's with what it is extrapolated from, and the trials that ran both ways."""
    cell = (
        f"{found.workload}, dense, goal error {found.goal_error:g} checked every "
        f"{found.check_interval} steps, budget "
        f"{found.max_steps:,} steps, {found.workers} trials at a time."
    )
    paragraphs = [cell, OURS.format(found.engine), _ours(found), PAPERS, _paper(found)]
    paragraphs += [
        f"All cells, the paper's time over ours: {between(found.ratio, ratio)}; with memory kept "
        f"{between(found.ratio_kept, ratio)}."
    ]
    paragraphs += [
        f"Outraced trials that ran to their end afterwards: {_calibrated(found)}.",
        BOTH,
        _both(found),
    ]
    return "\n\n".join(
        [*paragraphs, *([] if torch.cuda.is_available() else [f"On a GPU: {NO_GPU}."])]
    )


def _ours(found: Protocol) -> str:
    rows = []
    for cell in found.cells:
        counts = [sum(cell.counts.values()), *(cell.counts.get(status, 0) for status in Status)]
        done = [f"{cell.paper_steps.lower:,}", format_duration(cell.ours_seconds)]
        rows.append([cell.batch_size, cell.k_star or "-", _point(cell.best), *counts, *done])
    return table(["B", "K*", "best point", "trials", *Status, "steps", "time"], rows)


def _paper(found: Protocol) -> str:
    rows = []
    for cell in found.cells:
        steps = between(cell.paper_steps, "{:,.0f}".format)
        for memory, paper in zip(("given back", "kept"), _papers(cell), strict=True):
            measured = [
                seconds(sample) for sample in (paper.cost.start, paper.cost.step, paper.cost.check)
            ]
            time = [between(paper.seconds, format_duration), between(paper.ratio, ratio)]
            rows.append([cell.batch_size, memory, *measured, steps, *time])
    extrapolated = ["steps (at least to at most)", "time", "the paper's time / ours"]
    return table(["B", "memory", "start of a trial", "a step", "a check", *extrapolated], rows)


def _both(found: Protocol) -> str:
    rows = [
        [
            cell.batch_size,
            both.ours.point,
            str(both.ours),
            str(both.paper),
            "same" if both.same else "DIFFERENT",
        ]
        for cell in found.cells
        for both in cell.both
    ]
    return table(["B", "point", "ours", "the paper's", "ends"], rows)


def _calibrated(found: Protocol) -> str:
    ends = [
        f"B = {c.batch_size} point {end.point} {end}" for c in found.cells for end in c.calibrated
    ]
    return "; ".join(ends) or "none (`--calibrate`)"


def _point(params: Mapping[str, Value]) -> str:
    names = short_names(list(params))
    parts = []
    for key, value in params.items():
        text = value if isinstance(value, str) else f"{value:.4g}"
        parts.append(f"{names[key]} {text}")
    return ", ".join(parts) or "-"
