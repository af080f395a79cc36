"""What the model of a script computes in its first steps, so that a resumed study trains the same.

The code of a script does not show all values that decide its training, such as entries of a dict.
So a study stores the initial weights, the optimizer, and the results of the first steps.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from lit_dps.core.attempt import Attempt
from lit_dps.core.environment import COMPUTED, HALF, INEXACT, UNKNOWN
from lit_dps.core.errors import first_line
from lit_dps.core.progress_line import StageLine, print_wrapped
from lit_dps.core.record import HARDWARE
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.lightning_loop import LightningLoop
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.preflight.batch_size_check import has_full_precision
from lit_dps.study.preflight.varied_trials import trials_with_each_value, with_cell
from lit_dps.study.setup import StudySetup
from lit_dps.training import GoalErrorCallback, lightning_private
from lit_dps.training.deterministic import deterministic_kernels, one_thread
from lit_dps.training.object_difference import is_plain
from lit_dps.training.rate_curve import rate_curve

STEPS = 2
PARAMETERS = "parameters"
INITIAL_NORM = "norm of the initial weights"
OPTIMIZER = "optimizer"
MEAN_RATE = "mean learning rate of the schedule"
# Arguments of the data that may change what training draws or how validation rounds, and no value
# before the first step.
DRAWING = ("eval_batch_size", "order_seed", "num_workers")
FAILED = "first steps"  # the name in place of all values if the steps fail
DIGITS = 6  # of a hash that is shown


def first_steps(
    setup: StudySetup,
    environment: Mapping[str, Any],
    stored: Sequence[Mapping[str, Any]] = (),
) -> dict[str, list[str]]:
    """Return what the first steps of a study compute, if only this process can import its classes.

    Few trials of point 0 train `STEPS` steps and validate: dense ones with each value of the axes
    and choices of model and data, one at the largest batch size, and one at the largest sparsity. A
    stored study trains the stored trials again.

    Args:
        setup: The study.
        environment: The versions and the machine.
        stored: The stored environments of the study.

    Returns:
        Values by name, such as "training loss at model.width=64"; see
        `lit_dps.core.environment.COMPUTED`. A value is `UNKNOWN` if two runs differ. Empty if each
        process can import all classes.
    """
    if not setup.local_classes:
        return {}
    short_trials = _trials_of(setup)
    expected: dict[str, list[Sequence[str]]] = {}
    for each in stored:
        for name, version in each.get(COMPUTED, {}).items():
            if version != UNKNOWN:
                expected.setdefault(name, []).append(version)
    for name, versions in expected.items():
        kind, _, place = name.partition(" at ")
        if kind == PARAMETERS:
            with suppress(ValueError):  # a text of an earlier version
                short_trials[place] = _read(versions[-1][2], setup)
    computed: dict[str, list[str]] = {}
    with StageLine("first steps of your model") as line:
        for number, (place, short_trial) in enumerate(short_trials.items(), 1):
            reader = partial(_Reader, line, f"trial {number} of {len(short_trials)}")
            computed |= _computed(setup, short_trial, environment, place, expected, reader)
    return computed


class _ShortTrial(NamedTuple):
    """A trial, and the `max_steps` that its module sees."""

    trial: Trial
    max_steps: int


def _trials_of(setup: StudySetup) -> dict[str, _ShortTrial]:
    """Return the trials whose first steps are compared, by what distinguishes them."""
    study = setup.study
    max_steps = setup.built_goal.max_steps
    varied = [key for key, box in study.space.items() if isinstance(box, Choices)]
    trials: dict[str, _ShortTrial] = {}
    for trial in trials_with_each_value(setup, ["model", "data"]):
        dense = with_cell(trial, sparsity=0.0)
        values = {**dict(trial.cell.axes), **{key: trial.params[key] for key in varied}}
        parts = []
        for key, value in values.items():
            if key.startswith(("model.", "data.")):
                parts.append(f"{key}={value}")
        trials.setdefault(" ".join(parts), _ShortTrial(dense, max_steps))
    first = next(iter(trials.values())).trial
    if len(study.batch_sizes) > 1:
        largest = max(study.batch_sizes)
        trials[f"B={largest}"] = _ShortTrial(with_cell(first, batch_size=largest), max_steps)
    if any(study.sparsities):
        sparsity = max(study.sparsities)
        trials[f"S={sparsity:g}"] = _ShortTrial(with_cell(first, sparsity=sparsity), max_steps)
    return trials


def _computed(
    setup: StudySetup,
    short_trial: _ShortTrial,
    environment: Mapping[str, Any],
    place: str,
    expected: Mapping[str, Sequence[Sequence[str]]],
    reader: Callable[[], _Reader],
) -> dict[str, list[str]]:
    """Return the values of a trial as they are stored, by name.

    The trial is trained a second time if the values are not the expected ones.
    """
    where = f" at {place}" if place else ""
    context = _context(setup, environment)

    def run() -> dict[str, list[str]]:
        versions = {}
        for name, value in _run(setup, short_trial, reader()).items():
            versions[name + where] = [*value, _written(setup, short_trial, name, context), context]
        return versions

    try:
        with one_thread(), deterministic_kernels() if setup.on_gpu else nullcontext():
            versions = run()
            is_expected = bool(expected)
            for name, version in versions.items():
                is_expected &= version in list(map(list, expected.get(name, ())))
            again = versions if is_expected else run()
    except Exception as error:  # the user's code may depend on the earlier runs of a process
        print_wrapped(f"note: The first steps{where} fail: {first_line(error)}.")
        return {FAILED: UNKNOWN}
    computed = {}
    for name, version in versions.items():
        computed[name] = version if again.get(name) == version else UNKNOWN
    return computed


def _context(setup: StudySetup, environment: Mapping[str, Any]) -> str:
    """Return the processor and the versions, which decide how floats are rounded."""
    parts = [torch.backends.cpu.get_cpu_capability()]
    for name, value in environment.items():
        if name == HARDWARE or name.startswith("version."):
            parts.append(f"{name} {value}")
    if not has_full_precision(setup.workload.trainer):
        parts.append(HALF)
    return (INEXACT if setup.on_gpu else "") + ", ".join(parts)


def _written(setup: StudySetup, short_trial: _ShortTrial, name: str, context: str) -> str:
    """Return a trial as text, with all that decides whether a value of it can be compared.

    Trials on a CPU and on a GPU draw different random numbers. One example that rounding flips
    changes the metric of the goal, so it is compared only on one processor and with one version.
    """
    trial = short_trial.trial
    cell = trial.cell
    parts: list[Any] = [
        *(cell.batch_size, cell.sparsity, cell.axes, trial.params, trial.seed),
        *(short_trial.max_steps, setup.on_gpu),
    ]
    if name not in (PARAMETERS, INITIAL_NORM, OPTIMIZER, MEAN_RATE):
        data = setup.workload.data.get("init_args", {})
        parts.append({key: data[key] for key in DRAWING if key in data})
    if name == setup.built_goal.metric:
        parts.append(context)
    return json.dumps(parts, default=str)


def _read(text: str, setup: StudySetup) -> _ShortTrial:
    """Return the trial of a text of `_written`."""
    batch_size, sparsity, axes, params, seed, max_steps, *_ = json.loads(text)
    cell = Cell(batch_size, sparsity, tuple((key, value) for key, value in axes))
    return _ShortTrial(Trial(cell, 0, params, seed), max_steps)


def _run(
    setup: StudySetup, short_trial: _ShortTrial, reader: _Reader
) -> dict[str, tuple[str, str]]:
    """Train the first steps of a trial, and return values for people and exact values, by name."""
    trial, max_steps = short_trial
    goal = replace(setup.goal, check_interval=STEPS, max_steps=STEPS, early_reject=False)
    shown_steps = max(max_steps, STEPS)
    attempt = Attempt(trial, setup.unreachable_goal(STEPS - 1))
    with setup.workload.without_side_effects() as workload:
        settings = replace(
            setup.trial_settings(),
            goal=goal,
            shown_steps=shown_steps,
            workload=workload,
            readings=(),
        )
        LightningLoop(settings, (reader,)).train(attempt)
    for name, key in (("training loss", "train_loss"), (attempt.goal.metric, attempt.goal.metric)):
        for value in attempt.curve[key]:
            if not math.isnan(value):  # as with manual optimization
                reader.values[name] = f"{value:.6g}", repr(value)
    return reader.values


class _Reader(Callback):
    """Reads the weights and the optimizers at the beginning of a run, and the trained weights.

    Args:
        line: Shows the progress of the validation.
        state: The trial on this line, such as "trial 1 of 3".
    """

    def __init__(self, line: StageLine, state: str):
        self.values: dict[str, tuple[str, str]] = {}
        self._line = line
        self._state = state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        shapes = []
        number = 0
        for name, weight in pl_module.named_parameters():
            if not is_lazy(weight):
                number += weight.numel()
                shapes.append(f"{name} {tuple(weight.shape)} {weight.dtype} {weight.requires_grad}")
        digest = fingerprint(shapes)
        self.values[PARAMETERS] = f"{number} (shapes {digest[:DIGITS]})", digest
        self._read_weights(INITIAL_NORM, pl_module)
        options: dict[str, Any] = {}
        items: list[tuple[Any, Any]] = [(each, each.param_groups) for each in trainer.optimizers]
        for config in trainer.lr_scheduler_configs:
            items.append((config.scheduler, config.scheduler.state_dict()))
        for number, (item, state) in enumerate(items):
            name = type(item).__name__
            options |= _options(state, f"{name} {number}" if number else name)
        text = ", ".join(f"{key} = {value}" for key, value in options.items())
        self.values[OPTIMIZER] = text, json.dumps(options)
        epoch = lightning_private.callbacks_of(trainer, GoalErrorCallback)[0].steps_of_epoch
        rates = rate_curve(trainer, pl_module, trainer.max_steps, epoch)
        if rates is not None:
            mean = sum(rates) / len(rates)
            self.values[MEAN_RATE] = f"{mean:.6g}", fingerprint(rates)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_weights("norm of the trained weights", pl_module)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._line.update(self._state)

    def _read_weights(self, name: str, module: LightningModule) -> None:
        weights = []
        for weight in [*module.parameters(), *module.buffers()]:
            if not is_lazy(weight):
                weights.append(weight.detach().cpu().to_dense())
        norm = math.sqrt(sum(_square_sum(each) for each in weights))
        self.values[name] = f"{norm:.6g}", fingerprint(weights)


def _square_sum(weight: Tensor) -> float:
    if weight.is_complex():
        weight = weight.abs()
    return float(weight.double().square().sum())


def _options(value: Any, name: str) -> dict[str, str]:
    """Return the plain values in the state of an optimizer or a schedule, as texts by name."""
    if isinstance(value, Counter):  # the milestones of MultiStepLR
        value = sorted(value.elements())
    if isinstance(value, Mapping):
        parts = [(f"{name}.{key}", each) for key, each in value.items() if key != "params"]
    elif isinstance(value, (list, tuple)) and not is_plain(value):
        parts = [(f"{name}[{i}]", each) for i, each in enumerate(value)]
    else:
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        return {name: repr(value)} if is_plain(value) and value is not None else {}
    options = {}
    for part, each in parts:
        options |= _options(each, part)
    return options
