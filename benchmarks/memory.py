"""Peak resident memory of a worker process, and how much of it is a trial's own."""

from __future__ import annotations

import dataclasses
import re
import resource
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import made_up
from benchmarks.options import Options
from benchmarks.pool import pool
from benchmarks.setups import UNREACHABLE, middle_trial, on_cpu, paper_setup, run_trial
from benchmarks.text import table
from lit_dps.core.trial import LIGHTNING, Cell
from lit_dps.study.setup import StudySetup

TITLE = "Memory of a worker"
CELLS = tuple(
    Cell(batch_size, sparsity) for sparsity in (0.0, 0.9) for batch_size in (16, 1024, 16384)
)
STEPS = 2  # of the trial, before a full check
STORED, CHECKS = (
    100,
    (25, 250, 2_500),
)  # trials that a worker finds stored, and checks of each; the paper's budget last
OTHERS = [Cell(2, 0.0), Cell(4, 0.0)]  # of the stored trials
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A worker with one trial; MiB of peak resident memory.

    Attributes:
        batch_size: Examples a step.
        sparsity: Share of pruned parameters.
        imports: After the imports of a worker.
        data: After the data set was read.
        peak: After the trial: the worker's.
    """

    batch_size: int
    sparsity: float
    imports: float
    data: float
    peak: float

    @property
    def own(self) -> float:
        """MiB over the bare imports, with the data set, which the trials of a worker share."""
        return self.peak - self.imports


@dataclass(frozen=True)
class Stored:
    """What a worker holds in memory of a stored trial of the cell that it runs: KiB, by its number
    of checks."""

    trials: int
    checks: int
    each: float


@dataclass(frozen=True)
class Memory:
    """All cells, each in a process of its own, and stored trials."""

    workload: str
    steps: int
    rows: tuple[Row, ...]
    stored: tuple[Stored, ...]


def measure(options: Options) -> Memory:
    """MiB of a fresh process for each cell: a trial of few steps, with its pruning pass, and a full
    check."""
    setup = on_cpu(paper_setup(options.quick))
    rows = []
    for cell in [Cell(16, 0.9)] if options.quick else CELLS:
        with pool(1, 1) as apply:
            [found] = apply(worker, [(setup, cell)])
        rows.append(Row(cell.batch_size, cell.sparsity, *found))
    trials, checks = (10, CHECKS[:1]) if options.quick else (STORED, CHECKS)
    return Memory(
        setup.workload_name(), STEPS, tuple(rows), tuple(_stored(trials, n) for n in checks)
    )


def show(found: Memory) -> str:
    """A row a cell."""
    head = ["B", "S", "bare imports", "with the data set", "with a trial: peak", "over the imports"]
    numbers = [[row.imports, row.data, row.peak, row.own] for row in found.rows]
    rows = [
        [row.batch_size, f"{row.sparsity:g}", *(f"{x:,.0f} MiB" for x in mib)]
        for row, mib in zip(found.rows, numbers, strict=True)
    ]
    return (
        f"{found.workload}, on one CPU thread, {found.steps} steps and a full check in a process "
        "of its own, measured "
        "once. Each number is the peak until then; reading the data set takes more for a moment "
        "than it keeps."
        f"\n\n{table(head, rows)}\n\nWhat a worker holds of each stored trial of the cell that it "
        "runs, with made-up "
        "results:\n\n"
        + table(
            ["checks of a trial", "KiB"],
            [[f"{s.checks:,}", f"{s.each:,.0f}"] for s in found.stored],
        )
    )


def _stored(trials: int, checks: int) -> Stored:
    """KiB of each of so many finished trials in a fresh worker that asks for a trial of the next
    cell."""
    with (
        tempfile.TemporaryDirectory() as few,
        tempfile.TemporaryDirectory() as many,
        pool(1, 1) as apply,
    ):
        made_up.fill(made_up.store(few, 2, OTHERS), OTHERS[0], 2, checks)
        made_up.fill(made_up.store(many, trials, OTHERS), OTHERS[0], trials, checks)
        before, after = apply(ask, [(few, 2), (many, trials)])
    return Stored(trials, checks, 1024 * (after - before) / trials)


def ask(folder: str, points: int) -> float:
    """MiB of this process's peak after it has asked for a trial of the second cell, the first one
    being finished."""
    made_up.store(folder, points, OTHERS).claim_next()
    return peak()


def worker(setup: StudySetup, cell: Cell) -> tuple[float, float, float]:
    """MiB of this process's peak now, after reading the data set, and after a trial."""
    imports, trial = peak(), middle_trial(setup, cell)
    setup.workload.build(trial).data.setup("fit")
    data = peak()
    goal = dataclasses.replace(
        setup.goal,
        error=UNREACHABLE,
        check_interval=STEPS,
        max_steps=STEPS,
        early_reject=False,
    )
    run_trial(setup, trial, goal, lean=setup.study.engine != LIGHTNING)
    return imports, data, peak()


def peak() -> float:
    """MiB of this process's peak resident memory."""
    # getrusage counts in what the parent had when it started this process, as Linux keeps it across
    # exec
    try:
        found = re.search(
            r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024 / MIB
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / MIB if sys.platform == "darwin" else used * 1024 / MIB
