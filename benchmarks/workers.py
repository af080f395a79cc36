"""Two ways to use the cores: a worker a core with one thread each, or one worker with all
threads."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass

from benchmarks.numbers import Sample
from benchmarks.options import Options
from benchmarks.setups import UNREACHABLE, on_cpu, paper_setup, varied
from benchmarks.text import ratio, seconds, table, times
from lit_dps.core.config import cores
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.header import declare
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import work_in_processes

TITLE = "Workers and threads"
STEPS = {
    2: 1_600,
    16: 480,
    128: 160,
}  # of a trial by batch size: long enough that starting one does not matter
TRIALS = 4  # for each core, so that no worker idles for long at the end
TARGET = 1.8  # of a worker a core over one with all threads, on two cores


@dataclass(frozen=True)
class Row:
    """One way to use the cores.

    Attributes:
        batch_size: Examples a step.
        steps: Of a trial.
        workers: Processes at a time.
        threads: Threads of each.
        rate: Trials an hour, from the first trial's begin to the last one's end.
        ratio: That rate over the baseline's: one worker with all threads.
        start: Seconds from starting the processes to the first trial's begin.
    """

    batch_size: int
    steps: int
    workers: int
    threads: int
    rate: Sample
    ratio: Sample
    start: Sample


@dataclass(frozen=True)
class Workers:
    """What each way made of the same trials, so many at each batch size."""

    workload: str
    trials: int
    rows: tuple[Row, ...]


def measure(options: Options) -> Workers:
    """Trials an hour of a study's own worker processes, each way in turn."""
    n = cores()
    ways = dict.fromkeys(
        [*([] if options.quick else [(n, 1)]), (1, n), (1, 1)]
    )  # once each on one core
    steps, trials = ({128: 16}, 2) if options.quick else (STEPS, TRIALS * n)
    setup = on_cpu(paper_setup(options.quick))
    space = {
        key: dataclasses.replace(box, low=box.at(0.4), high=box.at(0.6))
        for key, box in setup.study.space.items()
    }
    # one trial at a time: it is the threads that are asked about
    fixed = {
        "sparsities": [0.0],
        "trials": trials,
        "race_factor": None,
        "space": space,
        "engine": "single",
    }
    rows: list[Row] = []
    for batch_size, n_steps in steps.items():
        goal = {"error": UNREACHABLE, "max_steps": n_steps, "early_reject": True}
        cell = varied(setup, goal=goal, batch_sizes=[batch_size], **fixed)
        rounds = [
            {way: _run(cell, *way) for way in ways}
            for _ in range(1 if options.quick else options.repeats)
        ]
        rate = {way: Sample(tuple(found[way][0] for found in rounds)) for way in ways}
        start = {way: Sample(tuple(found[way][1] for found in rounds)) for way in ways}
        rows += [
            Row(batch_size, n_steps, *way, rate[way], rate[way].over(rate[1, n]), start[way])
            for way in ways
        ]
    return Workers(setup.workload_name(), trials, tuple(rows))


def show(found: Workers) -> str:
    """A row for each way at each batch size."""
    head = [
        "B",
        "steps of a trial",
        "workers",
        "threads of each",
        "trials an hour",
        "ratio",
        "target, at least",
        "reachable",
        "start",
    ]
    alone = {
        row.batch_size: row.ratio.median
        for row in found.rows
        if (row.workers, row.threads) == (1, 1)
    }
    rows = []
    for row in found.rows:
        verdict = reachable = ""
        if row.workers > 1:
            reachable = ratio(row.workers * alone[row.batch_size])
        if (row.workers, row.threads) == (2, 1):
            verdict = f"x{TARGET}: {'met' if row.ratio.median >= TARGET else 'missed'}"
        measured = [
            times_per_hour(row.rate),
            times(row.ratio),
            verdict,
            reachable,
            seconds(row.start),
        ]
        rows.append([row.batch_size, row.steps, row.workers, row.threads, *measured])
    return (
        f"{found.workload}, dense, {found.trials} trials, a check every 16 steps that stops "
        "early, no racing; without "
        "the start of the processes, which stands beside. Baseline: one worker with all threads. "
        "The target is for a "
        "worker a core, the default of `study.workers`, on two cores. Reachable: so many times "
        "one worker with one "
        "thread as there are workers, as if they did not slow each other down; the better a "
        "second thread serves one "
        f"worker, the less is left to gain.\n\n{table(head, rows)}"
    )


def times_per_hour(rate: Sample) -> str:
    """Trials an hour, with their spread."""
    return f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"


def _run(setup: StudySetup, workers: int, threads: int) -> tuple[float, float]:
    """Trials an hour, and seconds until the first one began."""
    with tempfile.TemporaryDirectory() as folder:
        setup = varied(setup, folder, workers=workers, threads=threads)
        goal, name = setup.built_goal, setup.workload_name()
        _, uid = declare(setup.storage.optuna_url, setup.study, name, goal, {}, {})
        setup = dataclasses.replace(setup, uid=uid)
        begin, begun, ended = time.perf_counter(), [], []
        for result in work_in_processes(setup, workers, StopRequest()):
            ended.append(time.perf_counter())
            begun.append(ended[-1] - result.seconds)
        return 3600 * len(ended) / (max(ended) - min(begun)), min(begun) - begin
