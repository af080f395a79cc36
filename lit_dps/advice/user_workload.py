"""The user's batch size, learning rate and optimizer, and the study that probes around them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import OneCycleLR

from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.step_probe import MIN_STEPS, fit_threads, of_one_device
from lit_dps.core.attempt import Attempt
from lit_dps.core.batch_scaling import BETA2_FLOOR
from lit_dps.core.errors import ConfigError, first_line
from lit_dps.core.optimizer_kind import common_rate_power
from lit_dps.core.search_space import RATE_NAMES, Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import AdamScales, adam_scales_of
from lit_dps.training.example_count import declared_batch_size
from lit_dps.training.optimizer_groups import (
    describe_unlisted,
    mixed_rates_note,
    optimizer_kinds,
)
from lit_dps.training.schedule_scaling import SeenSchedule, scaled_clock, seen_schedule
from lit_dps.training.trainer_rules import as_list
from lit_dps.training.workload import Workload, locate

# The default range is from the module's rate divided by this to the rate times this.
RATE_RANGE_FACTOR = 32.0
SCALING_CALLBACK = "lit_dps.training.AdamScalingCallback"
SCHEDULE_CALLBACK = "lit_dps.training.ScheduleScalingCallback"
# The power of B by which the rate grows if the groups of parameters have different rules. It is the
# smaller one, which diverges less.
MIXED_POWER = 0.5


@dataclass(frozen=True)
class Decay:
    """A decay of the learning rate, which ends at the same step at every batch size.

    Attributes:
        name: The class of the schedule.
        end: The step after which the rate is constant.
        warm_up: Steps of the warm-up at the user's batch size; it is kept in examples.
        batch_size: The user's batch size.
        rates: The rate at each step, at the user's batch size.
    """

    name: str
    end: int
    warm_up: int
    batch_size: int
    rates: tuple[float, ...]

    @classmethod
    def of(cls, schedule: SeenSchedule, batch_size: int) -> Decay | None:
        """Return the decay of a schedule at the user's batch size; None without one."""
        if schedule.decay_end is None or schedule.config is None:
            return None
        name = type(schedule.config.scheduler).__name__
        return cls(name, schedule.decay_end, schedule.warm_up, batch_size, schedule.rates)

    def share_at(self, step: float, batch_size: int) -> float:
        """Return the rate after a step at a batch size, over the highest rate."""
        new_warm_up = float(self.warm_up)
        if self.batch_size:
            new_warm_up *= self.batch_size / batch_size
        clock = scaled_clock(self.warm_up, self.end, new_warm_up)
        # A tolerance, because 3 * (1 / 3) may be below 1.
        time = min(int(clock.at(step) + 1e-9), len(self.rates) - 1)
        return self.rates[time] / max(self.rates)

    def note(self, batch_size: int, steps: float) -> str | None:
        """Return what the decay means for steps to the goal; None if it ends before the goal."""
        if steps >= self.end:
            return None
        share = self.share_at(steps, batch_size)
        return (
            f"{self.name} changes the learning rate until step {self.end} at every batch size. At "
            f"the goal of B = {batch_size} the rate is {share:.0%} of its highest value. A "
            "schedule that ends at the goal needs other steps."
        )


class ProbeStudy(NamedTuple):
    """The study that probes.

    Attributes:
        setup: Its configuration.
        adaptive: Settings of an adaptive optimizer at the user's batch size, which follow the batch
            size in probes; None for other optimizers, and if a callback of the user scales them.
        notes: Notes for the user.
        plan: The user's run, for the method "pilot"; else None.
        decay: The decay of the learning rate; None without one.
    """

    setup: StudySetup
    adaptive: AdamScales | None
    notes: list[str]
    plan: PilotPlan | None = None
    decay: Decay | None = None


def user_batch_size(workload: Workload) -> int:
    """Return the batch size of an optimizer step in the configuration, else the class's default.

    Raises:
        ConfigError: if neither has one.
    """
    key = workload.batch_size_key
    value = user_value(workload, key)
    if not isinstance(value, int) or value < 1:
        allowed = f"a key with a batch size to start from. Set {key}"
        raise ConfigError("study.batch_size_key", key, allowed)
    return value * workload.accumulated


def user_value(workload: Workload, key: str) -> Any:
    """Return the configured value of a key of the model or the data, else the class's default."""
    specs = {"model": dict(workload.model), "data": dict(workload.data)}
    node, name = locate(specs, key, "study.space")
    if node.get(name) is not None:
        return node[name]
    section = workload.model if key.startswith("model.") else workload.data
    return _defaults(section).get(name)


def rate_range(workload: Workload) -> dict[str, Range]:
    """Return a range around the module's learning rate, for an empty study.space.

    Raises:
        ConfigError: if no argument is named lr or learning_rate, or several are.
    """
    arguments = {**_defaults(workload.model), **workload.model.get("init_args", {})}
    rates = {}
    for path, value in _numbers(arguments, "model"):
        if path.rpartition(".")[2] in RATE_NAMES and 0 < value < math.inf:
            rates[path] = value
    if len(rates) != 1:
        problem = "no argument lr or learning_rate"
        if rates:
            problem = f"{', '.join(rates)} are several"
        example = "model.lr: {low: 1e-4, high: 0.1, scale: log}"
        raise ConfigError(
            "study.space", {}, f"a range of the learning rate, such as {example} ({problem})"
        )
    ((path, rate),) = rates.items()
    return {path: Range(rate / RATE_RANGE_FACTOR, rate * RATE_RANGE_FACTOR, "log")}


def rate_key(setup: StudySetup) -> str:
    """Return the metaparameter that is the learning rate; "" if none is searched."""
    for key in setup.study.space:
        if key.rpartition(".")[2] in RATE_NAMES:
            return key
    return ""


def probe_setup(setup: StudySetup, adaptive: AdamScales | None, warm_up: int = 0) -> StudySetup:
    """Return the study that probes: the dense network at the user's batch size and others.

    Args:
        setup: The user's configuration.
        adaptive: Settings of an adaptive optimizer that follow the batch size; else None.
        warm_up: Steps of a warm-up at the user's batch size that is kept in examples; else 0.
    """
    space = setup.study.space or rate_range(setup.workload)
    batch_size = user_batch_size(setup.workload)
    study = dataclasses.replace(
        setup.study,
        name=f"{setup.study.name}{PROBES_SUFFIX}",
        batch_sizes=[batch_size],
        sparsities=[0.0],
        grid={},
        goals=[],
        space=space,
        noise_scale=False,
        readings=[],
        # The answer is for `fit`, and steps are timed with these threads.
        threads=fit_threads(setup),
    )
    trainer = dict(setup.workload.trainer)
    callbacks = as_list(trainer.get("callbacks"))
    # A callback of the user scales already, and Lightning saves only one of each class.
    if has_callback(callbacks, SCHEDULE_CALLBACK):
        warm_up = 0
    if adaptive is not None:
        arguments: dict[str, Any] = {"reference": batch_size}
        if adaptive.rate is not None and adaptive.weight_decay:
            arguments["rate"] = adaptive.reference_rates
        scaling = {"class_path": SCALING_CALLBACK, "init_args": arguments}
        trainer["callbacks"] = [*as_list(trainer.get("callbacks")), scaling]
    if warm_up:
        arguments = {"reference": batch_size, "warm_up": warm_up}
        scaling = {"class_path": SCHEDULE_CALLBACK, "init_args": arguments}
        trainer["callbacks"] = [*as_list(trainer.get("callbacks")), scaling]
    return dataclasses.replace(
        setup,
        study=study,
        workload=dataclasses.replace(setup.workload, trainer=trainer),
        smoothness=dataclasses.replace(setup.smoothness, interval=None),
    )


def has_callback(callbacks: Sequence[Any], class_path: str) -> bool:
    """Return True if callbacks of a configuration have one of a class, by its name."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, Mapping):
            name = str(callback.get("class_path"))
        if name.rpartition(".")[2] == class_path.rpartition(".")[2]:
            return True
    return False


def prepare_branches(setup: StudySetup, scales: bool = True) -> ProbeStudy:
    """Return the study of the run that is forked, at the user's metaparameters.

    Args:
        setup: The user's configuration.
        scales: Whether the settings of an adaptive optimizer follow the batch size.
    """
    plan = _plan_of(setup)
    base = probe_setup(plan.setup(setup), adaptive=None)
    if not scales:
        return ProbeStudy(base, None, [])
    trial = Trial(Cell(plan.batch_size), 0, {}, base.study.seed)
    look = _look_or_note(
        base, trial, "it is unknown whether beta2 has to change with the batch size"
    )
    adaptive = _scaled_here(base, look.adaptive)
    probes = probe_setup(plan.setup(setup), adaptive, look.warm_up)
    notes = [*look.notes, *_note_on_space(setup, plan)]
    return ProbeStudy(probes, adaptive, notes, decay=look.decay)


def _scaled_here(setup: StudySetup, adaptive: AdamScales | None) -> AdamScales | None:
    """Return the settings that `advise` scales: None if a callback of the user scales them."""
    if has_callback(as_list(setup.workload.trainer.get("callbacks")), SCALING_CALLBACK):
        return None
    return adaptive


def _note_on_space(setup: StudySetup, plan: PilotPlan) -> list[str]:
    """Return a note if `study.space` has ranges, none of which is searched."""
    if not setup.study.space:
        return []
    settings = {plan.rate_key: plan.rate, **plan.params}
    values = ", ".join(f"{key} = {value}" for key, value in settings.items())
    return [f"study.space is not searched. Your run has {values}."]


def _scaling_notes(adaptive: AdamScales, batch_size: int) -> list[str]:
    """Return a note on the settings that change with the batch size; [] if there are none."""
    changes = []
    if adaptive.beta2 is not None:
        changes.append(f"beta2 becomes beta2^(B / {batch_size}), at least {BETA2_FLOOR:g}")
    if adaptive.weight_decay:
        rate = "the learning rate"
        if adaptive.rate is not None:
            rate += f" / {adaptive.rate:g}"
        changes.append(f"the weight decay is multiplied by (B / {batch_size}) / ({rate})")
    if not changes:
        return []
    return [f"At a batch size B other than {batch_size}, {', and '.join(changes)}."]


class OptimizerLook(Callback):
    """Reads the optimizers and the schedule of a run when training starts, then ends the run.

    Attributes:
        adaptive: Settings that follow the batch size; None without an adaptive optimizer.
        warm_up: Steps of the warm-up, if it can be kept in examples; else 0.
        rate_power: The power of the batch size by which the learning rate grows; None if the
            optimizers need different ones.
        decay: The decay of the learning rate; None without one.
        notes: Notes on optimizers of unknown classes, which were measured, on optimizers whose
            rates follow different rules, and on the schedule.
        most_steps: The optimizer steps after which the schedule raises an error; infinite without
            such a schedule.
        was_read: Whether the optimizers were read.
    """

    def __init__(self) -> None:
        self.adaptive: AdamScales | None = None
        self.warm_up = 0
        self.rate_power: float | None = None
        self.decay: Decay | None = None
        self.notes: list[str] = []
        self.most_steps = math.inf
        self.was_read = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            self.notes += describe_unlisted(optimizer)
        self.notes += mixed_rates_note(trainer.optimizers)
        self.adaptive = adam_scales_of(trainer.optimizers)
        self.rate_power = common_rate_power(optimizer_kinds(trainer.optimizers))
        schedule = seen_schedule(trainer, pl_module)
        batch_size = declared_batch_size(trainer) * trainer.accumulate_grad_batches
        self.notes += schedule_notes(schedule, batch_size)
        self.decay = Decay.of(schedule, batch_size)
        if batch_size:
            self.warm_up = schedule.warm_up
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, OneCycleLR) and config.interval == "step":
                steps = config.scheduler.total_steps * config.frequency
                self.most_steps = min(self.most_steps, steps)
        self.was_read = True
        raise EndProbe

    def refuse_longer(self, setup: StudySetup) -> None:
        """Raise ConfigError if the schedule ends with an error before goal.max_steps."""
        most_steps = setup.built_goal.max_steps
        if most_steps > self.most_steps:
            allowed = (
                f"at most {self.most_steps:g}, because OneCycleLR of the module fails after "
                "these steps"
            )
            hint = "Or use trainer.max_steps as its total_steps."
            raise ConfigError("goal.max_steps", most_steps, allowed, hint)


def schedule_notes(schedule: SeenSchedule, batch_size: int) -> list[str]:
    """Return what a schedule means for the answer, a note a fact.

    Args:
        schedule: The schedule at the user's batch size.
        batch_size: The user's batch size; 0 if the data do not declare it.
    """
    notes = []
    if schedule.hidden:
        notes.append(
            f"{', '.join(schedule.hidden)} cannot be scaled, because the module has several "
            "optimizers or schedules, or steps them itself. It has the same steps at every batch "
            "size, unless the module computes them from the batch size."
        )
    if schedule.warm_up and batch_size:
        notes.append(
            f"The warm-up of {schedule.warm_up} steps at B = {batch_size} takes "
            f"{schedule.warm_up * batch_size} / B steps at a batch size B."
        )
    elif schedule.warm_up:
        notes.append(
            f"The warm-up takes {schedule.warm_up} steps at every batch size, because the data "
            "declare no batch size."
        )
    if schedule.decay_end is not None and schedule.config is not None:
        name = type(schedule.config.scheduler).__name__
        notes.append(
            f"{name} changes the learning rate until step {schedule.decay_end} at every batch "
            "size. If your schedule shall end at the goal, ask again with goal.max_steps near K."
        )
    return notes


def prepare_pilot(setup: StudySetup) -> ProbeStudy:
    """Return the study of the user's run and of the runs that follow, at his metaparameters.

    Raises:
        ConfigError: if no argument of the model is the learning rate.
    """
    plan = _plan_of(setup)
    base = probe_setup(plan.setup(setup), adaptive=None)
    trial = Trial(Cell(plan.batch_size), 0, {}, base.study.seed)
    look = _look_or_note(base, trial, "the learning rate follows sqrt(B)")
    if look.was_read:
        power = look.rate_power or MIXED_POWER
        plan = dataclasses.replace(plan, power=power, is_adaptive=look.adaptive is not None)
    notes = list(look.notes)
    adaptive = _scaled_here(base, look.adaptive)
    if adaptive is not None:
        notes += _scaling_notes(adaptive, plan.batch_size)
    notes += _note_on_space(setup, plan)
    study = probe_setup(plan.setup(setup), adaptive, look.warm_up)
    return ProbeStudy(study, adaptive, notes, plan, look.decay)


def _look_or_note(setup: StudySetup, trial: Trial, consequence: str) -> OptimizerLook:
    """Return `look_at_optimizers`; if that fails, no settings, and a note with the consequence.

    Raises:
        ConfigError: if the schedule ends with an error before goal.max_steps.
    """
    try:
        look = look_at_optimizers(setup, trial)
    except Exception as error:
        # If the module cannot be trained, the checks of the study refuse it next.
        look = OptimizerLook()
        look.notes = [f"The optimizer could not be read, so {consequence}: {first_line(error)}"]
    look.refuse_longer(setup)
    return look


def _plan_of(setup: StudySetup) -> PilotPlan:
    """Return the user's run, with the rate's rule of an unknown optimizer."""
    workload, space = setup.workload, setup.study.space
    key = rate_key(setup)
    if not key:
        ((key, _),) = rate_range(workload).items()
    params = {}
    for other, box in space.items():
        value = user_value(workload, other)
        params[other] = box.at(0.5) if value is None else value
    rate = params.pop(key, None)
    if rate is None:
        rate = user_value(workload, key)
    return PilotPlan(
        user_batch_size(workload), key, float(rate), MIXED_POWER, is_adaptive=None, params=params
    )


def look_at_optimizers(setup: StudySetup, trial: Trial) -> OptimizerLook:
    """Return what the optimizers of a trial are when its training starts on one device.

    They see the budget of the study.

    Raises:
        Exception: An error of the module, its data or a callback before training.
    """
    look = OptimizerLook()
    probe_run(of_one_device(setup), Attempt(trial, setup.unreachable_goal(MIN_STEPS)), [look])
    return look


def _defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of the arguments of a class."""
    module, _, name = spec["class_path"].rpartition(".")
    arguments = inspect.signature(getattr(import_module(module), name).__init__).parameters
    empty = inspect.Parameter.empty
    return {key: p.default for key, p in arguments.items() if p.default is not empty}


def _numbers(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested arguments by their dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            arguments = value.get("init_args", {}) if "class_path" in value else value
            yield from _numbers(arguments, f"{path}.{key}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{path}.{key}", float(value)
