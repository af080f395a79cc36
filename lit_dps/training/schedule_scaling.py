"""Keeps the warm-up of the learning rate in examples when the batch size changes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SCHEDULE, WARM_UP
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.batch_schedule_callback import refuse_batch_schedule
from lit_dps.training.example_count import declared_batch_size, record_batches
from lit_dps.training.rate_curve import MOST_STEPS, SAME, rate_curve, schedule_shape


@dataclass(frozen=True)
class ScheduleClock:
    """The time of a schedule as a function of the optimizer step: two straight lines.

    Attributes:
        warm_up: Steps of the schedule's warm-up, as the module made it.
        new_warm_up: Optimizer steps in which the warm-up is passed.
        length: Steps after which the rate of the module's schedule is constant; None if unknown.
        new_length: Optimizer steps in which the schedule is passed; None like `length`.
    """

    warm_up: float
    new_warm_up: float
    length: float | None
    new_length: float | None

    def at(self, step: float) -> float:
        """Return the time of the schedule after an optimizer step."""
        if step <= self.new_warm_up:
            if self.new_warm_up == 0:
                return 0.0
            return step * self.warm_up / self.new_warm_up
        after = step - self.new_warm_up
        if self.length is None or self.new_length is None:
            return self.warm_up + after
        if self.length <= self.warm_up or step >= self.new_length:
            return self.length
        pace = (self.length - self.warm_up) / (self.new_length - self.new_warm_up)
        return self.warm_up + after * pace


def scaled_clock(
    warm_up: float, length: float | None, new_warm_up: float, horizon: float | None = None
) -> ScheduleClock:
    """Return a clock with another warm-up.

    Args:
        warm_up: Steps of the schedule's warm-up.
        length: Steps of the whole schedule; None if it is unknown.
        new_warm_up: Steps that the warm-up shall take.
        horizon: Steps that the whole schedule shall take; None keeps them. A schedule that is only
            a warm-up ends with it.
    """
    if length is None:
        return ScheduleClock(warm_up, new_warm_up, None, None)
    # The rate of a warm-up alone is constant one step after its last change.
    if length <= warm_up + 1:
        return ScheduleClock(warm_up, new_warm_up, length, new_warm_up + length - warm_up)
    new_length = length
    if horizon is not None:
        new_length = horizon
    if new_length <= new_warm_up:
        # The run ends within its warm-up.
        return ScheduleClock(warm_up, new_warm_up, None, None)
    return ScheduleClock(warm_up, new_warm_up, length, new_length)


@dataclass(eq=False)
class ScaledSchedule:
    """A schedule that is stepped by a clock: several times in an optimizer step, or not at all.

    It passes everything else on to the schedule.

    Attributes:
        schedule: The schedule.
        clock: The clock.
        frequency: Optimizer steps between two calls of `step`.
        calls: Calls of `step` so far.
        position: Steps of the schedule so far.
    """

    schedule: Any
    clock: ScheduleClock
    frequency: int = 1
    calls: int = 0
    position: int = 0

    def step(self, *args: Any) -> None:
        """Step the schedule until its time is that of the clock."""
        self.calls += 1
        # A tolerance, because 3 * (1 / 3) may be below 1.
        target = math.floor(self.clock.at(self.calls * self.frequency) / self.frequency + 1e-9)
        while self.position < target:
            self.schedule.step(*args)
            self.position += 1

    @property
    def _schedulers(self) -> list[Any]:
        """The schedules inside, as `SequentialLR` names them."""
        return [self.schedule, *getattr(self.schedule, "_schedulers", ())]

    def __getattr__(self, name: str) -> Any:
        if name == "schedule":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.schedule, name)


class ScheduleScalingCallback(Callback):
    """Keep the warm-up of the learning rate in examples when the batch size changes.

    A warm-up of w steps at batch size B0 takes w B0 / B steps at batch size B. The rest of the
    schedule ends at the same step, or at `horizon`. A schedule that already follows the batch size
    does not change, such as one by epochs, or one whose warm-up the module computes from B. B is
    the declared batch size of the data.

    Only a module with one optimizer, automatic optimization and one schedule by steps is scaled.
    Another schedule is named in a warning.

    Args:
        reference: B0, in examples of an optimizer step.
        warm_up: w, the optimizer steps of the warm-up at B0; None keeps the module's warm-up. They
            are the steps before the first one at the largest rate. If step t, from 0, has the rate
            (t + 1) / w times the largest one, w may include this step, as `warmup_steps` does.
        horizon: Optimizer steps after which the schedule ends; None keeps its length.

    Attributes:
        clock: The clock of the schedule once training has begun; None if it is not changed.

    Raises:
        ConfigError: for values out of their range; when a fit begins for a batch schedule, or for
            data that declare no batch size.
    """

    def __init__(self, reference: int, warm_up: int | None = None, horizon: int | None = None):
        if reference < 1:
            raise ConfigError("ScheduleScalingCallback.reference", reference, "at least 1 example")
        if warm_up is not None and warm_up < 0:
            raise ConfigError(
                "ScheduleScalingCallback.warm_up", warm_up, "0 or more steps, or null"
            )
        if horizon is not None and horizon < 1:
            allowed = "at least 1 step, or null"
            raise ConfigError("ScheduleScalingCallback.horizon", horizon, allowed)
        self.reference = reference
        self.warm_up = warm_up
        self.horizon = horizon
        self.clock: ScheduleClock | None = None
        self._schedule: ScaledSchedule | None = None
        self._restored: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_batch_schedule(trainer, "ScheduleScalingCallback")
            record_batches(trainer)
            self.clock = None
            self._schedule = None
            self._restored = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restored:
            # The schedule of a resumed run has advanced, so its shape is that of the checkpoint.
            self.clock = ScheduleClock(**self._restored["clock"])
            calls = self._restored["calls"]
            self._install(trainer, calls, self._restored["position"])
            return
        seen = seen_schedule(trainer, pl_module)
        if seen.hidden:
            rank_zero_warn(
                f"ScheduleScalingCallback does not change {', '.join(seen.hidden)}: it needs one "
                "optimizer, automatic optimization and one schedule. Give the warm-up in examples "
                "in your module."
            )
        if not seen.shape:
            return
        new_warm_up = seen.shape[WARM_UP]
        if self.warm_up is not None:
            new_warm_up = self._new_warm_up(seen, self.warm_up, self._batch_size(trainer))
        length = seen.shape.get(SCHEDULE)
        self.clock = scaled_clock(seen.shape[WARM_UP], length, new_warm_up, self.horizon)
        self._install(trainer, 0, 0)

    def _new_warm_up(self, seen: SeenSchedule, warm_up: int, batch_size: int) -> float:
        """Return the optimizer steps before the first one at the largest rate.

        Args:
            seen: The schedule of the module.
            warm_up: w, with or without this step.
            batch_size: B, the examples of an optimizer step.
        """
        shown = seen.warm_up
        includes_largest = math.isclose(seen.rates[0] * (shown + 1), max(seen.rates), rel_tol=SAME)
        if includes_largest and warm_up == shown + 1:
            warm_up = shown
        new_warm_up = warm_up * self.reference / batch_size
        # The module follows the batch size already.
        if includes_largest and warm_up != shown and math.isclose(new_warm_up, shown + 1):
            return shown
        return new_warm_up

    def _batch_size(self, trainer: Trainer) -> int:
        """Return the examples of an optimizer step."""
        size = declared_batch_size(trainer)
        if not size:
            name = type(trainer.train_dataloader).__name__
            raise ConfigError(
                "data", name, "data with a batch size, because ScheduleScalingCallback needs it"
            )
        if not isinstance(trainer.strategy, SharedBatchDDP):
            size = sum(ranks.all_gather(size))  # each rank has different batches
        return size * trainer.accumulate_grad_batches

    def _install(self, trainer: Trainer, calls: int, position: int) -> None:
        """Let the clock step the schedule."""
        assert self.clock is not None
        (config,) = [each for each in trainer.lr_scheduler_configs if not each.reduce_on_plateau]
        self._schedule = ScaledSchedule(
            config.scheduler, self.clock, config.frequency, calls, position
        )
        config.scheduler = self._schedule  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        if self.clock is None or self._schedule is None:
            return {}
        return {
            "clock": asdict(self.clock),
            "calls": self._schedule.calls,
            "position": self._schedule.position,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)


@dataclass(frozen=True)
class SeenSchedule:
    """The schedule of a module, as far as it can be read.

    Attributes:
        config: The only schedule by steps; None without one, or if it cannot be scaled. A schedule
            by epochs is in examples already, and one that follows a metric has no length.
        hidden: Classes of schedules by steps that cannot be scaled.
        shape: Steps of warm-up and schedule, as `schedule_shape` returns them.
        rates: The learning rate at each step; empty if it cannot be read.
    """

    config: LRSchedulerConfig | None
    hidden: tuple[str, ...]
    shape: dict[str, float]
    rates: tuple[float, ...] = ()

    @property
    def warm_up(self) -> int:
        """The steps of the warm-up that can be scaled; 0 without one."""
        return int(self.shape.get(WARM_UP, 0))

    @property
    def decay_end(self) -> int | None:
        """The step after which the rate is constant, if it changes after the warm-up."""
        length = self.shape.get(SCHEDULE)
        if length is None or length <= self.warm_up + 1:
            return None
        return int(length)


def seen_schedule(trainer: Trainer, module: LightningModule) -> SeenSchedule:
    """Return what can be read of a module's schedule when training starts."""
    configs = [config for config in trainer.lr_scheduler_configs if not config.reduce_on_plateau]
    by_steps = [config for config in configs if config.interval == "step"]
    if not by_steps:
        return SeenSchedule(None, (), {})
    budget = trainer.max_steps
    if budget < 1:
        budget = int(min(trainer.estimated_stepping_batches, MOST_STEPS))
    rates = rate_curve(trainer, module, budget, None)
    if len(configs) > 1 or rates is None:
        hidden = tuple(type(config.scheduler).__name__ for config in by_steps)
        return SeenSchedule(None, hidden, {})
    return SeenSchedule(by_steps[0], (), schedule_shape(rates, budget), tuple(rates))
