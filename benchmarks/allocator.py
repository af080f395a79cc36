"""Freed memory kept for the next step, and given back to the system as the C library does by
default."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.numbers import Sample, interleaved
from benchmarks.options import Options
from benchmarks.pool import Apply, pool
from benchmarks.setups import middle_trial, on_cpu, paper_setup
from benchmarks.step import WARM, bare
from benchmarks.text import seconds, table, times
from lit_dps.core.trial import Cell
from lit_dps.parallel.process import SWITCH
from lit_dps.study.setup import StudySetup

TITLE = "Memory kept from step to step"
BATCH_SIZES = (16, 128, 1024, 4096)
FEWEST = 5  # steps timed
KEPT, BACK = "kept", "given back"


@dataclass(frozen=True)
class Row:
    """Seconds of one thing both ways, and the second over the first."""

    what: str
    kept: Sample
    back: Sample
    ratio: Sample


@dataclass(frozen=True)
class Allocators:
    """All rows, and the peak resident memory of each process over them: MiB."""

    workload: str
    rows: tuple[Row, ...]
    peak_kept: float
    peak_back: float


def measure(options: Options) -> Allocators:
    """Steps of a bare loop and full passes over the validation split, in two processes that take
    turns."""
    setup = on_cpu(paper_setup(options.quick))
    sizes = (16,) if options.quick else BATCH_SIZES
    with pool(1, 1) as kept, pool(1, 1, keep=False) as back:
        # the check first: after steps of thousands of images so much is free that glibc has room
        # for it too
        rows = [_row("a full check", (_check, setup), kept, back, options)]
        rows += [
            _row(f"a step, B = {n:,}", (_step, setup, n, options.seconds), kept, back, options)
            for n in sizes
        ]
        peaks = [apply(_peak, [()])[0] for apply in (kept, back)]
    return Allocators(setup.workload_name(), tuple(rows), *peaks)


def show(found: Allocators) -> str:
    """A row for each thing timed."""
    text = (
        f"{found.workload}, one CPU thread: the bare loop of the steps above, and a pass over the "
        "validation split "
        "without Lightning. Baseline: freed memory is kept, as in all commands and all other "
        "sections here; else the "
        f"GNU C library's defaults ({SWITCH}=0)."
    )
    rows = [
        [row.what, seconds(row.kept), seconds(row.back), times(row.ratio)] for row in found.rows
    ]
    peaks = (
        f"Peak memory of the process over all of these: {found.peak_kept:,.0f} MiB, and "
        f"{found.peak_back:,.0f} MiB."
    )
    return f"{text}\n\n{table(['', KEPT, BACK, f'{BACK} / {KEPT}'], rows)}\n\n{peaks}"


def _row(what: str, call: tuple, kept: Apply, back: Apply, options: Options) -> Row:
    function, *arguments = call
    ways = {
        name: lambda way=way: way(function, [tuple(arguments)])[0]
        for name, way in ((KEPT, kept), (BACK, back))
    }
    found = interleaved(ways, options.repeats)
    return Row(what, found[KEPT], found[BACK], found[BACK].over(found[KEPT]))


def _step(setup: StudySetup, batch_size: int, least: float) -> float:
    trial = middle_trial(setup, Cell(batch_size, 0.0))
    once = bare(setup, trial, WARM + 2, "cpu")[0]
    return bare(setup, trial, WARM + max(FEWEST, round(least / once)), "cpu")[0]


def _check(setup: StudySetup) -> float:
    trial = middle_trial(setup, Cell(16, 0.0))
    built: Any = setup.workload.build(trial)
    built.data.setup("fit")
    network = built.module.network.to(memory_format=torch.channels_last).eval()
    parts = built.data.images.x["val"].split(built.data.eval_batch_size)
    with torch.no_grad():
        network(parts[0])
        begin = time.perf_counter()
        for part in parts:
            network(part)
    return time.perf_counter() - begin


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
