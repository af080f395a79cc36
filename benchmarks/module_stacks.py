"""Modules that know nothing of lit_dps, in a stack and in Lightning's loop: are K alike, and how
long does a trial take?

Both loops train trials of other seeds, so that the two samples of K are independent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from scipy.stats import ks_2samp

from benchmarks.options import Options
from benchmarks.step import threads
from benchmarks.text import table
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import LIGHTNING, Cell, Trial, TrialResult
from lit_dps.core.trial_config import GoalConfig
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.training.workload import Workload

TITLE = "Other people's modules in a stack"
TRIALS = 100
QUICK_TRIALS = 4
STACK_SIZE = 16
ANIMALS = "tests.zoo.animals.strangers."
# The chance that a right stack fails one of three tests is 3 in 1,000.
LEAST_P = 0.001


@dataclass(frozen=True)
class Kind:
    """A module, its data and its goal."""

    name: str
    model: str
    data: str
    batch_size: int
    rate: float
    goal: GoalConfig


KINDS = (
    Kind(
        "MLP with dropout",
        "Perceptron",
        "DigitLoaders",
        32,
        2e-3,
        GoalConfig(error=0.1, check_interval=4, max_steps=600),
    ),
    Kind(
        "ResNet with batch normalization",
        "SmallResNet",
        "DigitLoaders",
        32,
        5e-3,
        GoalConfig(error=0.2, check_interval=4, max_steps=600),
    ),
    Kind(
        "character transformer with dropout",
        "CharacterTransformer",
        "TextLoaders",
        16,
        1e-3,
        GoalConfig(metric="val_loss", at_most=1.3, check_interval=4, max_steps=600),
    ),
)


@dataclass(frozen=True)
class Row:
    """Trials of a module in both loops.

    Attributes:
        name: The module.
        lightning, stacked: K of each trial.
        lightning_seconds, stacked_seconds: Seconds of a trial.
        statistic, p: The two-sample test of Kolmogorov and Smirnov.
    """

    name: str
    lightning: tuple[int, ...]
    stacked: tuple[int, ...]
    lightning_seconds: float
    stacked_seconds: float
    statistic: float
    p: float


@dataclass(frozen=True)
class ModuleStacks:
    """All modules."""

    rows: tuple[Row, ...]


def measure(options: Options) -> ModuleStacks:
    """Trains the trials of each module in both loops."""
    trials = QUICK_TRIALS if options.quick else TRIALS
    with threads(1):
        return ModuleStacks(tuple(_measure(kind, trials) for kind in KINDS))


def _measure(kind: Kind, trials: int) -> Row:
    workload = Workload(
        {"class_path": ANIMALS + kind.model, "init_args": {}},
        {"class_path": ANIMALS + kind.data, "init_args": {}},
        {"accelerator": "cpu", "gradient_clip_val": 1.0},
    )
    training = TrialSettings(workload, kind.goal)
    by_lightning = TrialEngine(training, engine=LIGHTNING)
    lightning, lightning_seconds = _train(by_lightning, kind, range(trials))
    stack = TrialEngine(training, STACK_SIZE)
    stacked, stacked_seconds = _train(stack, kind, range(trials, 2 * trials))
    assert all(result.engine == "stacked" for result in stacked), stacked[0].engine_reason
    alone, together = [tuple(_steps_of(result) for result in each) for each in (lightning, stacked)]
    test: Any = ks_2samp(alone, together)
    return Row(
        kind.name,
        alone,
        together,
        lightning_seconds / trials,
        stacked_seconds / trials,
        float(test.statistic),
        float(test.pvalue),
    )


def _steps_of(result: TrialResult) -> int:
    assert result.steps is not None, f"point {result.trial.point} missed the goal"
    return result.steps


def _train(engine: TrialEngine, kind: Kind, points: range) -> tuple[list[TrialResult], float]:
    """Returns the results of trials and the seconds of all."""
    goal = kind.goal.build()
    cell = Cell(kind.batch_size, 0.0)
    attempts = [Attempt(Trial(cell, point, {"model.lr": kind.rate}), goal) for point in points]
    start = time.perf_counter()
    results = list(engine.train(lambda: attempts.pop(0) if attempts else None))
    return results, time.perf_counter() - start


def show(found: ModuleStacks) -> str:
    """Formats K and seconds of each module."""
    rows = []
    for row in found.rows:
        rows.append(
            [
                row.name,
                _quartiles(row.lightning),
                _quartiles(row.stacked),
                f"{row.statistic:.2f}",
                f"{row.p:.2f}",
                f"{row.lightning_seconds:.2f}",
                f"{row.stacked_seconds:.2f}",
            ]
        )
    trials = len(found.rows[0].stacked)
    text = table(
        ["", "K, Lightning's loop", "K, stacked", "D", "p", "s a trial", "s a trial, stacked"], rows
    )
    return (
        f"{trials} trials of each loop, of other seeds: quartiles of K, and the two-sample test of "
        f"Kolmogorov and Smirnov. One CPU thread, stacks of {STACK_SIZE}.\n\n{text}"
    )


def _quartiles(steps: tuple[int, ...]) -> str:
    return " / ".join(f"{value:.0f}" for value in quantiles(steps, n=4))


def verify(found: ModuleStacks) -> None:
    """Raises AssertionError where K of both loops are of different distributions."""
    for row in found.rows:
        assert row.p >= LEAST_P, f"{row.name}: p = {row.p:.2g}"
