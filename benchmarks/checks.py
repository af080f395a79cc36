"""A check of the validation split: the full pass, and the one that stops when the goal is missed
for certain."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.numbers import Sample
from benchmarks.options import Options
from benchmarks.setups import on_cpu, paper_setup, run_trial
from benchmarks.step import threads
from benchmarks.text import seconds, spread, table, times
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.training.early_validation import EarlyValidation

TITLE = "A check of the validation split"
BATCH_SIZE = 16
RATE = 0.05  # learning rate of SGD at which MNIST is at 2 % within some hundred steps
LEVELS = (
    1.0,
    0.5,
    0.2,
    0.1,
    0.05,
    0.03,
    0.0,
)  # validation errors between which checks are put together


@dataclass(frozen=True)
class Checked:
    """One check, made both ways at the same weights.

    Attributes:
        step: Optimizer step.
        error: Validation error, a fraction of the entire split.
        full: Seconds of Lightning's pass over the split.
        early: Seconds of the check that stops early.
        images: Images that this one looked at.
        same: Whether both say the same of the goal.
    """

    step: int
    error: float
    full: float
    early: float
    images: int
    same: bool


@dataclass(frozen=True)
class Level:
    """The checks at errors above `low` and up to `high`: seconds and images, one value a check."""

    low: float
    high: float
    full: Sample
    early: Sample
    images: Sample
    ratio: Sample


@dataclass(frozen=True)
class Checks:
    """The checks of one trial to its goal.

    Attributes:
        workload: What was trained.
        goal_error: The goal.
        learning_rate: Of the trial.
        batch_size: Of the trial.
        size: Images of the validation split.
        status: How the trial ended.
        steps: Where it ended.
        levels: The checks by the error that was reached.
        mean_ratio: Seconds of all full checks over seconds of all early ones.
        image_share: Images that early checks looked at, as a share of those of full ones.
        checks: Every check.
    """

    workload: str
    goal_error: float
    learning_rate: float
    batch_size: int
    size: int
    status: str
    steps: int
    levels: tuple[Level, ...]
    mean_ratio: float
    image_share: float
    checks: tuple[Checked, ...]


def measure(options: Options) -> Checks:
    """Trains one trial with full checks, and after each of them makes the early one too."""
    setup = on_cpu(paper_setup(options.quick))
    trial = Trial(Cell(BATCH_SIZE, 0.0), 0, {"model.learning_rate": RATE}, setup.study.seed)
    goal = dataclasses.replace(
        setup.goal,
        error=options.goal_error,
        max_steps=options.max_steps,
        early_reject=False,
    )
    watch = BothChecks(goal.build(), goal.monitor)
    with threads(1):
        result = run_trial(setup, trial, goal, callbacks=(watch,))
    checks, size = tuple(watch.checks), watch.check.size
    return Checks(
        setup.workload_name(),
        *(options.goal_error, RATE, BATCH_SIZE, size, str(result.status), result.steps_run),
        levels=tuple(by_level(checks)),
        mean_ratio=sum(c.full for c in checks) / sum(c.early for c in checks),
        image_share=sum(c.images for c in checks) / (size * len(checks)),
        checks=checks,
    )


def by_level(checks: tuple[Checked, ...]) -> list[Level]:
    """The checks put together by error, from the highest; levels without any are left out."""
    found = []
    for high, low in zip(LEVELS[:-1], LEVELS[1:], strict=True):
        inside = [check for check in checks if low < check.error <= high or check.error == low == 0]
        if inside:
            full, early = (
                Sample(tuple(getattr(c, name) for c in inside)) for name in ("full", "early")
            )
            images = Sample(tuple(float(check.images) for check in inside))
            found.append(Level(low, high, full, early, images, full.over(early)))
    return found


def show(found: Checks) -> str:
    """A row a level, and the whole run."""
    head = ["validation error", "checks", "full pass", "early", "images looked at", "full / early"]
    rows = [
        [
            *(
                f"{level.low:g} to {level.high:g}",
                len(level.full.values),
                seconds(level.full),
                seconds(level.early),
            ),
            *(spread(level.images, "{:,.0f}".format), times(level.ratio)),
        ]
        for level in found.levels
    ]
    ours = sum(check.same for check in found.checks)
    return (
        f"{found.workload}, B = {found.batch_size}, learning rate {found.learning_rate:g}, goal "
        "error "
        f"{found.goal_error:g}, one CPU thread; one trial, {found.status} after {found.steps:,} "
        "steps. Each check was "
        f"made both ways at the same weights, of {found.size:,} images; brackets have the "
        "smallest and the largest of "
        f"the checks. Baseline: the early check.\n\n{table(head, rows)}\n\n"
        f"Over the whole run a full pass costs x{found.mean_ratio:.1f} an early check, which "
        "looks at "
        f"{found.image_share:.1%} of the images. Both said the same of the goal in {ours} of "
        f"{len(found.checks)} checks."
    )


class BothChecks(Callback):
    """Times each full check, and makes an early one after it.

    Args:
        goal: What both ask.
        monitor: Name of the logged validation error.
    """

    def __init__(self, goal: Goal, monitor: str):
        self.goal, self.monitor, self.checks = goal, monitor, []
        self._images = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check = EarlyValidation(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        full, error = (
            time.perf_counter() - self._begin,
            float(trainer.callback_metrics[self.monitor]),
        )
        self._images, allowed = 0, self.goal.max_mistakes(self.check.size)
        count = pl_module.register_forward_pre_hook(self._count)
        begin = time.perf_counter()
        mistakes = self.check(allowed).mistakes
        early = time.perf_counter() - begin
        count.remove()
        same = (mistakes <= allowed) == self.goal.is_reached(error)
        self.checks.append(Checked(trainer.global_step, error, full, early, self._images, same))

    def _count(self, module: LightningModule, arguments: tuple) -> None:
        self._images += len(arguments[0])


def verify(found: Checks) -> None:
    """Raises AssertionError unless both checks always said the same of the goal."""
    different = [check for check in found.checks if not check.same]
    if different:
        raise AssertionError(f"early checks that say otherwise than full ones: {different}")
