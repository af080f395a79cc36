"""Steps by convolutions that skip pruned weights (`--engine sparse`) beside dense ones: MNIST,
Simple-CNN, SNIP.

`python -m benchmarks.sparse` prints a table, of trials in the middle of the search box with a check
every 16 steps.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.fused import rate
from benchmarks.numbers import interleaved
from benchmarks.setups import UNREACHABLE, middle_trial, on_cpu, paper_setup
from benchmarks.step import threads
from benchmarks.text import spread, table, times
from lit_dps.core.trial import Cell
from lit_dps.engines.engine import Training
from lit_dps.engines.interval_loop import IntervalLoop
from lit_dps.study.hardware import cpu_model
from lit_dps.study.setup import StudySetup
from lit_dps.training import GoalErrorCallback

GOAL = {"error": UNREACHABLE, "check_interval": 16, "early_reject": True}
STEPS = {2: 1024, 8: 512, 32: 256, 128: 96, 512: 32, 1024: 32}  # of a trial, by batch size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.9])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    setup = on_cpu(paper_setup(quick=False))
    with threads(1):
        cells = [
            Cell(batch_size, sparsity) for sparsity in options.sparsities for batch_size in STEPS
        ]
        rows = [_row(setup, cell, options.repeats) for cell in cells]
    print(table(["S", "B", "dense, steps/s", "sparse, steps/s", "ratio"], rows))
    print(f"\nOne thread of {cpu_model()}.")


def _row(setup: StudySetup, cell: Cell, repeats: int) -> list[str]:
    goal = {**GOAL, "max_steps": STEPS[cell.batch_size]}
    training = Training(setup.workload, goal, setup.pruning)  # of both, so that the scores are kept
    trials = [(middle_trial(setup, cell), GoalErrorCallback(**goal).goal)]
    engines = {"dense": IntervalLoop(training), "sparse": IntervalLoop(training, skips=True)}
    ways = {name: partial(rate, engine, trials, "cpu") for name, engine in engines.items()}
    for way in ways.values():
        way()  # what is done once a process: scores, kernels
    found = interleaved(ways, repeats)
    shown = [spread(found[name], "{:,.3g}".format) for name in ways]
    return [
        f"{cell.sparsity:g}",
        str(cell.batch_size),
        *shown,
        times(found["sparse"].over(found["dense"])),
    ]


if __name__ == "__main__":
    main()
