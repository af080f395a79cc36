"""Checks that a trial which resumes from a checkpoint ends like an uninterrupted trial.

A checkpoint contains the state that Lightning, the user's `state_dict`s and
`lit_dps.training.hidden_state` save. It lacks the state of closures and of other libraries'
objects. A trial that depends on such state would resume with other values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_dps.core.errors import ConfigError, first_line
from lit_dps.core.search_space import extreme_points
from lit_dps.core.trial import Status, Trial
from lit_dps.core.unit import SECONDS
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.preflight.short_trial import ShortGoal, build_short
from lit_dps.study.probe_run import train_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.checkpoint_files import CheckpointFile, Checkpoints
from lit_dps.training.workload import Built

ROUNDING = 1e-6  # relative; results may depend on the alignment of tensors in memory
ROUNDING_ON_GPU = 1e-4  # as `ROUNDING`, on a GPU
ROUNDING_OF_ORDER = 1e-2  # relative; some kernels of a GPU add numbers in an order that changes
LONGER = 3  # factor of the first batches of an epoch, compared with the dry run


def check_resume(settings: TrialSettings, trial: Trial, setup: StudySetup) -> list[str]:
    """Compare a short trial that resumes after its first step with an uninterrupted trial.

    No trial runs if module and data are ours and there are no callbacks.

    Args:
        settings: The settings of the study.
        trial: The trial.
        setup: The study.

    Returns:
        Notes of one line each.

    Raises:
        ConfigError: if the trial resumes with other values; names the module or the data module.
    """
    if setup.study.checkpoint_minutes is None:
        return []
    short = build_short(settings, trial)
    if short.epochs.goal.is_ours:
        return []
    name = type(short.fit.built.module).__name__
    trial, uninterrupted, failure = _first_finite_run(settings, trial, setup)
    if uninterrupted is None:
        return [f"whether trials of {name} can resume is not known: {failure}"]
    if len(uninterrupted.steps) < 2:
        # The budget is spent at the first check, so a trial ends where it would be saved.
        return []
    resumed, reason = _interrupted(settings, trial)
    if resumed is None:
        return [f"trials of {name} cannot resume: after an interruption they restart ({reason})"]
    rounding = ROUNDING_ON_GPU if setup.on_gpu else ROUNDING
    difference = uninterrupted.difference(resumed, rounding)
    if difference is None:
        return []
    # Two runs may differ without an interruption, such as with an unseeded generator.
    second = _run(settings, trial)
    unreproducible = second.difference(uninterrupted, 0.0)
    if unreproducible is not None and setup.on_gpu:
        unreproducible = second.difference(uninterrupted, ROUNDING_OF_ORDER)
        difference = uninterrupted.difference(resumed, ROUNDING_OF_ORDER)
    if unreproducible is not None:
        return [
            f"trials of {name} are not reproducible: two runs of one trial differ, "
            f"{unreproducible.text}"
        ]
    if difference is None:
        return []
    raise _resume_error(short.fit.built, difference, int(resumed.steps[0]))


def _first_finite_run(
    settings: TrialSettings, trial: Trial, setup: StudySetup
) -> tuple[Trial, _ShortRun | None, str]:
    """Run short trials at several points, until one neither fails nor diverges.

    A trial that diverges ends before it is saved, and its weights that are not finite hide a
    difference. The points are the trial's point and the ends of the search space.

    Returns:
        The trial, its results and ""; the last trial, None and the reason if there is none.
    """
    failure = ""
    for params in [trial.params, *extreme_points(setup.space)]:
        trial = replace(trial, params=params)
        try:
            run = _run(settings, trial)
        # For example, a module may read what a first validation changed.
        except Exception as error:
            failure = f"a short trial fails ({type(error).__name__}: {first_line(error)})"
            continue
        if run.status is not Status.INFEASIBLE:
            return trial, run, ""
        failure = (
            f"a short trial diverges within {int(run.steps[-1])} steps at the ends of study.space"
        )
    return trial, None, failure


@dataclass(frozen=True)
class _Difference:
    """A difference between two runs of a trial.

    Attributes:
        text: The difference in words.
        is_of_data: Whether the training data differ.
    """

    text: str
    is_of_data: bool = False


def _resume_error(built: Built, difference: _Difference, saved_at: int) -> ConfigError:
    """Return the error about a trial that resumes from a step with other values."""
    if difference.is_of_data:
        key = "data"
        names = [type(built.data).__name__]
        hooks = "state_dict and load_state_dict"
    else:
        key = "model"
        names = [type(each).__name__ for each in [built.module, *built.trainer["callbacks"]]]
        hooks = (
            "on_save_checkpoint and on_load_checkpoint (a callback in state_dict and "
            "load_state_dict)"
        )
    allowed = (
        "an object whose state a checkpoint restores. After a resume from step "
        f"{saved_at} {difference.text}. Save its state in {hooks}, or set "
        "study.checkpoint_minutes: null"
    )
    return ConfigError(key, ", ".join(names), allowed)


@dataclass
class _ShortRun:
    """The results of a short trial.

    Attributes:
        batches: Hashes of the batches, by number.
        curve: The metrics, as in `Attempt.curve`.
        weights: Parameters and buffers at the end.
        status: How the trial ended.
    """

    batches: dict[int, str] = field(default_factory=dict)
    curve: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    status: Status | None = None

    @property
    def steps(self) -> list[float]:
        """The optimizer steps of the validations."""
        return self.curve["step"]

    def difference(self, other: _ShortRun, rounding: float) -> _Difference | None:
        """Return the first difference from another run; None if both are equal."""
        for number in sorted(self.batches.keys() & other.batches.keys()):
            if self.batches[number] != other.batches[number]:
                return _Difference(f"batch {number + 1} is another batch", is_of_data=True)
        return self._difference_of_curve(other, rounding) or self._difference_of_weights(
            other, rounding
        )

    def _difference_of_curve(self, other: _ShortRun, rounding: float) -> _Difference | None:
        for metric, values in self.curve.items():
            if metric == SECONDS.column:
                continue
            other_values = other.curve.get(metric, [])
            if len(other_values) != len(values):
                return _Difference(f"{metric} has {len(other_values)} values and not {len(values)}")
            for step, one, two in zip(self.curve["step"], values, other_values, strict=True):
                if _gap(torch.tensor(one), torch.tensor(two)) > rounding:
                    return _Difference(f"{metric} of step {step:g} is {two:.6g} and not {one:.6g}")
        return None

    def _difference_of_weights(self, other: _ShortRun, rounding: float) -> _Difference | None:
        for name, tensor in self.weights.items():
            if name not in other.weights or tensor.shape != other.weights[name].shape:
                return _Difference(f"{name} is missing or has another shape")
            if _gap(tensor, other.weights[name]) > rounding:
                return _Difference(f"{name} has other values")
        new_names = sorted(other.weights.keys() - self.weights.keys())
        return _Difference(f"{new_names[0]} is new") if new_names else None


def _gap(one: Tensor, two: Tensor) -> float:
    """Return the largest difference of two tensors relative to their largest number."""
    one, two = one.detach().cpu().double(), two.detach().cpu().double()
    if torch.allclose(one, two, rtol=0, atol=0, equal_nan=True):
        return 0.0
    gap = (one - two).abs().max() / torch.maximum(one.abs(), two.abs()).max()
    return float(gap.nan_to_num(torch.inf))


class _Interrupted(Exception):
    """Ends a short trial at its first validation."""


def _interrupted(settings: TrialSettings, trial: Trial) -> tuple[_ShortRun | None, str]:
    """Interrupt a short trial at its first validation, and resume it.

    Returns:
        The results of the resumed trial and ""; None and the reason if it cannot resume.
    """
    messages: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lit_dps-") as folder:
        checkpoints = Checkpoints(Path(folder), None, minutes=0, report=messages.append)
        settings = replace(settings, checkpoints=checkpoints)
        file = checkpoints.file(trial, {})

        def interrupt() -> None:
            raise _Interrupted

        try:
            with suppress(_Interrupted):
                _run(settings, trial, file, interrupt)
            path = file.find()
            if path is not None:
                return _run(settings, trial, file, checkpoint=path), ""
        # For example, a module may not save all of its state.
        except Exception as error:
            return None, f"{type(error).__name__}: {first_line(error)}"
    if messages:
        return None, messages[-1].removeprefix("warning: ")
    return None, "its position in the training data cannot be saved"


def _run(
    settings: TrialSettings,
    trial: Trial,
    file: CheckpointFile | None = None,
    raise_if_stopped: Callable[[], None] = lambda: None,
    checkpoint: Path | None = None,
) -> _ShortRun:
    """Train a short trial, from a checkpoint if there is one, and return its results."""
    short = build_short(settings, trial, file, raise_if_stopped)
    epochs = short.epochs
    epochs.validates_untrained = False
    if not epochs.is_manual:
        epochs.first_batches *= LONGER
    recorder = _Recorder(epochs.goal)
    train_fit(short.fit, trial, [epochs, recorder], checkpoint)
    run = recorder.run
    run.curve = short.attempt.curve
    run.status = short.attempt.status
    return run


class _Recorder(Callback):
    """Records batches and weights of a short trial, and makes it validate after its first step."""

    def __init__(self, goal: ShortGoal):
        self.goal = goal
        self.run = _ShortRun()
        self._number = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.goal.is_early = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.run.batches[self._number] = fingerprint(batch)
        self._number += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, value in pl_module.state_dict().items():
            if isinstance(value, Tensor):
                self.run.weights[name] = value.clone()

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._number = state_dict["number"]
