"""Finds idle keys: keys of the grid and of the search that change nothing in a trial.

If a module ignores an argument, the curves are equal at every value of its axis. The dry run trains
a few steps at two values of each key, everything else equal. It compares all results exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.search_space import Box, Choices
from lit_dps.core.trial import Cell, Trial, Value, text_of
from lit_dps.core.trial_config import plain
from lit_dps.engines.engine import Training
from lit_dps.optim import RULES
from lit_dps.storage.samplers import sobol_point
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.preflight.short_trial import goal_of, perturb, run_short
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import texts_in
from lit_dps.training.rate_curve import rate_curve

STEPS = 3  # of a trial without validation
MOST_CONTEXTS = 8  # combinations of the other keys' values with which a key is tested
POINTS = 3  # points of the search among these combinations
LIBRARIES = ("lit_dps.", "lightning.", "pytorch_lightning.")
# Arguments of our data modules that only affect the speed, or that name a folder.
IDLE_OF_DATA = ("eval_batch_size", "root", "download")
# Effects of a key
ACTS, UNKNOWN = "changes a trial", "is not known"
NOTHING = "changes nothing"
OPTIONS = "changes options of the optimizer and nothing else"


def idle_keys(training: Training, setup: StudySetup) -> list[str]:
    """Return a note for each key that changes nothing in the first steps of a trial.

    A key is not idle if it changes a result at one combination of the other keys' values. For
    example, momentum may belong to one of several optimizers. There is no note for a key whose
    trials fail or are not reproducible.

    Args:
        training: What the trials have in common.
        setup: The study.
    """
    study = setup.study
    axes = {key: values for key, values in study.axes.items() if len(values) > 1}
    notes: list[str] = []
    tested: list[str] = []
    for key in [*axes, *study.space]:
        if key.startswith("pruning.") and not max(study.sparsities):
            notes.append(f"{key} changes nothing: study.sparsities is 0 alone")
        elif not _is_known_to_act(setup, key):
            tested.append(key)
    if not tested:
        return notes
    runs = _Runs(training)
    trials = _contexts(setup)
    for key in tested:
        effect = _effect(runs, setup, trials, key)
        if effect in (ACTS, UNKNOWN):
            continue
        values = " and ".join(text_of(value) for value in _ends(setup, key))
        notes.append(
            f"{key} {effect}: batches, losses, weights and metrics of {runs.steps} steps are "
            f"equal at {values}; "
            "unless it acts later in a trial, leave it out"
        )
    return notes


def _effect(runs: _Runs, setup: StudySetup, trials: Sequence[Trial], key: str) -> str:
    """Return the effect of a key: `ACTS`, `UNKNOWN`, `NOTHING` or `OPTIONS`.

    Trials at both ends of the key are compared.
    """
    # First without validation and the end of an epoch, which take longer than a few steps.
    for run in (runs.light, runs.whole):
        effect = UNKNOWN
        for trial in _trials_for(key, trials):
            one = run(trial)
            if one is None:
                continue
            for value in _far_values(setup, trial, key):
                other = run(_with(trial, key, value))
                if other is None or one.results != other.results:
                    return ACTS
                if one.options != other.options:
                    effect = OPTIONS
                elif effect == UNKNOWN:
                    effect = NOTHING
        if effect == UNKNOWN:
            break
    return effect


def _trials_for(key: str, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials with which a key is tested; dense ones unless the key is of the pruning."""
    if not key.startswith("pruning."):
        return [replace(trial, cell=replace(trial.cell, sparsity=0.0)) for trial in trials]
    return list(trials)


def _is_known_to_act(setup: StudySetup, key: str) -> bool:
    """Return True if a key is known to change trials, because only code of ours reads it."""
    section, _, name = key.partition(".")
    values = _values(setup)
    texts = list(texts_in(_plain(_section(setup, section))))
    texts += texts_in(_plain(setup.workload.trainer.get("callbacks")))
    for other in values:
        if other.startswith(section + "."):
            texts += texts_in(values[other])
    if any(map(_is_foreign, texts)):
        return section in ("local", "optim")
    if section == "data":
        return name.removeprefix("init_args.") not in IDLE_OF_DATA
    if section != "model":
        return True
    argument = name.removeprefix("init_args.")
    arguments = setup.workload.model.get("init_args", {})
    if any(argument in rule.hyperparameters for rule in RULES.values()):
        rules = values.get("model.optimizer", [arguments.get("optimizer", "sgd")])
        return any(argument in RULES[rule].hyperparameters for rule in rules if rule in RULES)
    if argument in ("decay_steps", "end_factor"):
        return "linear" in values.get("model.schedule", [arguments.get("schedule", "constant")])
    return True


def _section(setup: StudySetup, name: str) -> Any:
    return {
        "model": setup.workload.model,
        "data": setup.workload.data,
        "pruning": plain(setup.pruning),
    }.get(name)


def _plain(nested: Any) -> Any:
    """Return a nested configuration with dicts in place of all other mappings."""
    if isinstance(nested, Mapping):
        return {key: _plain(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [_plain(value) for value in nested]
    return nested


def _values(setup: StudySetup) -> dict[str, list[Value]]:
    """Return all values of each axis and of each searched choice."""
    choices = {
        key: list(box.choices) for key, box in setup.space.items() if isinstance(box, Choices)
    }
    return {**choices, **setup.study.axes}


def _is_foreign(text: str) -> bool:
    """Return True if a text is the class path of code that is not ours."""
    return "." in text and os.sep not in text and not text.startswith(LIBRARIES)


def _contexts(setup: StudySetup) -> list[Trial]:
    """Return trials with all combinations of axes, all choices and some points of the search.

    At most `MOST_CONTEXTS` trials are returned.
    """
    study, space = setup.study, setup.study.space
    points = [sobol_point(space, study.seed, i, study.scramble) for i in range(POINTS)]
    smallest = min(study.batch_sizes)
    sparsity = max(study.sparsities)
    cells = list(dict.fromkeys(Cell(smallest, sparsity, cell.axes) for cell in study.cells))
    trials = [Trial(cell, 0, points[0], study.seed) for cell in cells]
    for key, box in space.items():
        if isinstance(box, Choices):
            trials += [
                replace(trials[0], params={**points[0], key: value}) for value in box.choices
            ]
    trials += [replace(trials[0], params=point) for point in points[1:]]
    unique: list[Trial] = []
    for trial in trials:
        if trial not in unique:
            unique.append(trial)
    return unique[:MOST_CONTEXTS]


def _box(setup: StudySetup, key: str) -> Box:
    axes = setup.study.axes
    return Choices(axes[key]) if key in axes else setup.study.space[key]


def _ends(setup: StudySetup, key: str) -> tuple[Value, Value]:
    """Return the first and the last value of a key."""
    if key in setup.study.axes:
        values = setup.study.axes[key]
        return values[0], values[-1]
    extremes = setup.study.space[key].extremes
    return extremes[0], extremes[-1]


def _far_values(setup: StudySetup, trial: Trial, key: str) -> list[Value]:
    """Return the ends of a key that differ from its value in a trial, the farther end first."""
    current = {**dict(trial.cell.axes), **trial.params}[key]
    first, last = _ends(setup, key)
    ends = [last, first]
    box = None if key in setup.study.axes else setup.study.space[key]
    if box is not None and not isinstance(box, Choices) and box.unit(current) > 0.5:
        ends.reverse()
    return [value for value in ends if value != current]


def _with(trial: Trial, key: str, value: Value) -> Trial:
    """Return a trial with another value of a key."""
    if key in trial.params:
        return replace(trial, params={**trial.params, key: value})
    others = {**dict(trial.cell.axes), key: value}
    return replace(trial, cell=replace(trial.cell, axes=tuple(others.items())))


class _Runs:
    """Runs each trial for a few steps, and keeps the result.

    Attributes:
        steps: Optimizer steps of the longest trial.
    """

    def __init__(self, training: Training):
        self.training = training
        self.steps = 0
        self._known: dict[str, _Recorder | None] = {}

    def light(self, trial: Trial) -> _Recorder | None:
        """Train the first steps of a trial. Return their record; None if the trial failed."""
        return self._once("light", trial, self._first_steps)

    def whole(self, trial: Trial) -> _Recorder | None:
        """Train a trial as the dry run does, with the end of an epoch and validation."""
        return self._once("whole", trial, self._short)

    def _once(self, kind: str, trial: Trial, run: Callable[[Trial], _Recorder]) -> _Recorder | None:
        name = f"{kind} {trial.cell!r} {sorted(trial.params.items())}"
        if name not in self._known:
            recorder = None
            with suppress(Exception):  # a user's class may fail at this value
                recorder = run(trial)
            self._known[name] = recorder
        return self._known[name]

    def _first_steps(self, trial: Trial) -> _Recorder:
        recorder = _Recorder(STEPS * self.training.workload.accumulated)
        probe_fit(self.training, trial, recorder)
        return recorder

    def _short(self, trial: Trial) -> _Recorder:
        recorder = _Recorder()
        short = run_short(self.training, trial, [recorder])
        self.steps = max(self.steps, short.goal.steps)
        return recorder


class _Recorder(Callback):
    """Records hashes of all results of the steps of a trial.

    Args:
        batches: The number of batches after which the fit ends; None to let the fit end by itself.

    Attributes:
        results: Hashes of weights, batches, losses, schedules and validation, in order.
        options: Hashes of the optimizers' options, with their rates before the first step.
    """

    def __init__(self, batches: int | None = None):
        self.batches = batches
        self.results: list[str] = []
        self.options: list[str] = []
        self._look: Callable[[Trainer], object] | None = None

    def _add(self, *values: Any) -> None:
        self.results += map(fingerprint, values)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        goal = goal_of(trainer)
        self._look = goal.validate_now
        self._add(
            pl_module.state_dict(),
            rate_curve(trainer, pl_module, trainer.max_steps, goal.steps_of_epoch),
        )
        self._add([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
        self._add([type(optimizer).__qualname__ for optimizer in trainer.optimizers])
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                self.options.append(
                    fingerprint({key: group[key] for key in group if key != "params"})
                )

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._add(batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._add(outputs)
        if self.batches is None:
            return
        self.batches -= 1
        if not self.batches:
            self._add(pl_module.state_dict())
            raise EndProbe

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        self._add(batch, outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add(dict(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add(pl_module.state_dict())
        if self.batches is None:
            perturb(pl_module)
            with suppress(Exception):  # the dry run itself reports validation that fails
                self._look(trainer)
