"""What the model of a script computes in its first steps, so that a resumed study trains the same.

The code of a script does not show all values that decide its training, such as entries of a dict.
So a study stores the initial weights, the optimizer, and the results of the first steps.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from lit_dps.core.attempt import Attempt
from lit_dps.core.environment import COMPUTED, UNKNOWN, changes_since
from lit_dps.core.errors import UserError
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.user_code import texts_in
from lit_dps.engines.lightning_loop import LightningLoop
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.hardware import cpu_model
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import GUARD_HINT, LOCAL
from lit_dps.training.deterministic import deterministic_kernels, one_thread
from lit_dps.training.object_difference import is_plain

STEPS = 2
_PACKAGES = ("torch", "lightning", "numpy")  # their versions may change how floats are rounded


def first_steps(
    setup: StudySetup, stored: Sequence[Mapping[str, Any]] = (), runs: int = 2
) -> dict[str, list[str]]:
    """Return what the first steps of a study compute, if only this process can import its classes.

    For each value of the axes of model and data, point 0 trains `STEPS` steps at the smallest batch
    size, and validates. A stored study trains the stored trial again.

    Args:
        setup: The study.
        stored: The stored environments of the study.
        runs: How often to train. Values that differ between two runs are `UNKNOWN`.

    Returns:
        Values by name, such as "training loss at model.width=64"; see
        `lit_dps.core.environment.COMPUTED`. Empty if each process can import all classes.
    """
    if not any(text.startswith(LOCAL) for text in texts_in(setup.config())):
        return {}
    trials: dict[str, Trial] = {}
    params = setup.sample(0)
    for cell in setup.study.cells:
        axes = [f"{key}={value}" for key, value in cell.axes if key.startswith(("model.", "data."))]
        place = " ".join(["", "at", *axes]) if axes else ""
        dense = Cell(min(setup.study.batch_sizes), 0.0, cell.axes)
        trials.setdefault(place, Trial(dense, 0, params, setup.study.seed))
    computed = {}
    for place, trial in trials.items():
        max_steps = setup.built_goal.max_steps
        for environment in stored:
            for name, version in environment.get(COMPUTED, {}).items():
                if name == f"parameters{place}" and version != UNKNOWN:
                    trial, max_steps = _read(version[2], trial)
        for name, version in _repeated(setup, trial, max_steps, runs).items():
            computed[name + place] = version
    return computed


def refuse_other_first_steps(setup: StudySetup) -> None:
    """Raise UserError if the first steps in this worker differ from those of its parent."""
    stored = setup.environment.content
    if stored.get(COMPUTED):
        changes = changes_since([stored], {COMPUTED: first_steps(setup, [stored], runs=1)})
        if changes:
            raise UserError(f"A worker differs: {', '.join(changes)}. {GUARD_HINT}", value=changes)


def _repeated(setup: StudySetup, trial: Trial, max_steps: int, runs: int) -> dict[str, list[str]]:
    """Return the values of one or two runs as they are stored."""
    context = [f"{each} {importlib.metadata.version(each)}" for each in _PACKAGES]
    context.append(cpu_model())
    if setup.on_gpu:
        context.append(torch.cuda.get_device_name())
    try:
        with one_thread(), deterministic_kernels() if setup.on_gpu else nullcontext():
            results = [_run(setup, trial, max_steps) for _ in range(runs)]
    except Exception:  # the user's code may depend on the earlier runs of a process
        return {"first steps": UNKNOWN}
    computed = {}
    for name, value in results[0].items():
        computed[name] = [*value, _written(setup, trial, max_steps), ", ".join(context)]
        if any(each.get(name) != value for each in results):
            computed[name] = UNKNOWN
    return computed


def _written(setup: StudySetup, trial: Trial, max_steps: int) -> str:
    """Return a trial as text. Trials on a CPU and on a GPU draw different random numbers."""
    cell = trial.cell
    parts = [cell.batch_size, cell.axes, trial.params, trial.seed, max_steps, setup.on_gpu]
    return json.dumps(parts, default=float)


def _read(text: str, trial: Trial) -> tuple[Trial, int]:
    """Return the trial of a text, and the `max_steps` that its module sees."""
    batch_size, axes, params, seed, max_steps, _ = json.loads(text)
    cell = Cell(batch_size, 0.0, tuple((key, value) for key, value in axes))
    return replace(trial, cell=cell, params=params, seed=seed), max_steps


def _run(setup: StudySetup, trial: Trial, max_steps: int) -> dict[str, tuple[str, str]]:
    """Train the first steps of a trial, and return values for people and exact values, by name."""
    goal = replace(setup.goal, check_interval=STEPS, max_steps=STEPS, early_reject=False)
    shown_steps = max(max_steps, STEPS)
    attempt = Attempt(trial, setup.unreachable_goal(STEPS - 1))
    reader = _Reader()
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
    """Reads the weights and the optimizers at the beginning of a run, and the trained weights."""

    def __init__(self):
        self.values: dict[str, tuple[str, str]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        shapes = []
        number = 0
        for name, weight in pl_module.named_parameters():
            if not is_lazy(weight):
                number += weight.numel()
                shapes.append(f"{name} {tuple(weight.shape)} {weight.dtype} {weight.requires_grad}")
        self.values["parameters"] = str(number), fingerprint(shapes)
        self._read_weights("norm of the initial weights", pl_module)
        items = [*trainer.optimizers, *[each.scheduler for each in trainer.lr_scheduler_configs]]
        text = "; ".join(_options(each) for each in items)
        self.values["optimizer"] = text, text

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_weights("norm of the trained weights", pl_module)

    def _read_weights(self, name: str, module: LightningModule) -> None:
        weights = []
        for weight in module.parameters():
            if not is_lazy(weight):
                weights.append(weight.detach().cpu().to_dense())
        norm = math.sqrt(sum(_square_sum(each) for each in weights))
        self.values[name] = f"{norm:.6g}", fingerprint(weights)


def _square_sum(weight: Tensor) -> float:
    return float(weight.abs().double().square().sum())


def _options(item: Any) -> str:
    """Return the class and the plain options of an optimizer or a schedule."""
    texts = []
    for group in getattr(item, "param_groups", None) or [item.state_dict()]:
        texts.append(", ".join(f"{key}={value}" for key, value in _plain_options(group)))
    return f"{type(item).__name__}({'; '.join(texts)})"


def _plain_options(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if key != "params" and not key.startswith("_") and value is not None and is_plain(value):
            yield key, value
