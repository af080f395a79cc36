"""Whether a trial that resumes from a checkpoint ends as an unbroken one.

A checkpoint has what Lightning, the user's `state_dict`s and `lit_dps.training.attributes` save. What closures and
objects of other libraries keep is not in it: such a trial would resume with other values.
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

from lit_dps.engines.engine import Training
from lit_dps.errors import ConfigError
from lit_dps.study.data_hashes import fingerprint
from lit_dps.study.setup import StudySetup
from lit_dps.study.short_trial import build_short
from lit_dps.training.checkpoints import CheckpointFile, Checkpoints
from lit_dps.training.generators import isolated
from lit_dps.trial import Trial

ROUNDING = 1e-6  # relative difference of equal tensors at other places in memory
ROUNDING_ON_GPU = 1e-2  # sums there may be taken in any order
LONGER = 3  # times the first batches of a dry run's epoch


def check_resume(training: Training, trial: Trial, setup: StudySetup) -> list[str]:
    """Compares a short trial that resumes after its first step with an unbroken one, and returns notes.

    Trials of our own module and data without callbacks are not run.

    Args:
        training: What the trials have in common.
        trial: The trial.
        setup: The study.

    Raises:
        ConfigError: if the trial resumes with other values, naming module or data module.
    """
    if setup.study.checkpoint_minutes is None:
        return []
    fit, _, epochs = build_short(training, trial)
    if epochs.goal.is_known:
        return []
    name = type(fit.built.module).__name__
    try:
        unbroken = _run(training, trial)
    except Exception:  # it reads what a first check has changed, say; the dry run has its own words for errors
        return []
    resumed, why = _interrupted(training, trial)
    if resumed is None:
        return [f"trials of {name} cannot resume: after an interruption they begin anew{why}"]
    rounding = ROUNDING_ON_GPU if setup.on_gpu else ROUNDING
    difference = unbroken.difference(resumed, rounding)
    if difference is None:
        return []
    # A module that draws from an unseeded generator, say, differs from itself.
    again = _run(training, trial).difference(unbroken, 0.0)
    if again is not None:
        return [f"trials of {name} are not reproducible: two runs of one trial differ, {again.text}"]
    kind, names = "model", [name, *(type(each).__name__ for each in fit.built.trainer["callbacks"])]
    saves = "on_save_checkpoint and on_load_checkpoint (a callback in state_dict and load_state_dict)"
    if difference.is_of_data:
        kind, names = "data", [type(fit.built.data).__name__]
        saves = "state_dict and load_state_dict"
    allowed = (
        f"one that resumes from a checkpoint as it was saved; after a resume from step {resumed.saved_at} "
        f"{difference.text}: save what it keeps in {saves}, or set study.checkpoint_minutes: null"
    )
    raise ConfigError(kind, ", ".join(names), allowed)


@dataclass(frozen=True)
class _Difference:
    """A difference between two runs of a trial, in words, and whether it is one of the training data."""

    text: str
    is_of_data: bool = False


@dataclass
class _Ended:
    """What a short trial computed.

    Attributes:
        batches: Hashes of the batches, by number.
        curve: As `Run.curve`.
        weights: Parameters and buffers at the end.
        saved_at: The optimizer step of the first check.
    """

    batches: dict[int, str] = field(default_factory=dict)
    curve: dict[str, list[float]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    saved_at: int = 0

    def difference(self, other: _Ended, rounding: float) -> _Difference | None:
        """Return the first difference of another run; None if there is none."""
        for number in sorted(self.batches.keys() & other.batches.keys()):
            if self.batches[number] != other.batches[number]:
                return _Difference(f"batch {number + 1} is another one", is_of_data=True)
        for metric, values in self.curve.items():
            pairs = zip(self.curve["step"], values, other.curve.get(metric, []), strict=False)
            for step, one, two in pairs:
                if _gap(torch.tensor(one), torch.tensor(two)) > rounding:
                    return _Difference(f"{metric} of step {step:g} is {two:.6g} and not {one:.6g}")
        for name, tensor in self.weights.items():
            if name not in other.weights or tensor.shape != other.weights[name].shape:
                return _Difference(f"{name} is missing or has another shape")
            if _gap(tensor, other.weights[name]) > rounding:
                return _Difference(f"{name} has other values")
        return None


def _gap(one: Tensor, two: Tensor) -> float:
    """Return the largest difference of two tensors relative to their largest number."""
    one, two = one.detach().cpu().double(), two.detach().cpu().double()
    if torch.equal(one.nan_to_num(), two.nan_to_num()):
        return 0.0
    gap = (one - two).abs().max() / torch.maximum(one.abs(), two.abs()).max()
    return float(gap.nan_to_num(torch.inf))


class _Interrupted(Exception):
    """A short trial is left at its first check."""


def _interrupted(training: Training, trial: Trial) -> tuple[_Ended | None, str]:
    """Interrupt a short trial at its first check and resume it.

    Returns:
        What it computed after it resumed; None if it cannot, and why.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="lit_dps-") as folder:
        checkpoints = Checkpoints(Path(folder), None, minutes=0, say=said.append)
        training = replace(training, checkpoints=checkpoints)
        file = checkpoints.file(trial, {})

        def leave() -> None:
            raise _Interrupted

        try:
            with suppress(_Interrupted):
                _run(training, trial, file, leave)
            path = checkpoints.find(trial, file.about)
            if path is not None:
                return _run(training, trial, file, saved=path), ""
        except Exception as error:  # of a module that keeps more than it saves, say
            return None, f" ({type(error).__name__}: {str(error).split(chr(10))[0]})"
    why = said[-1] if said else "its position in the training data cannot be saved"
    return None, f" ({why.removeprefix('warning: ')})"


def _run(
    training: Training,
    trial: Trial,
    file: CheckpointFile | None = None,
    at_check: Callable[[], None] = lambda: None,
    saved: Path | None = None,
) -> _Ended:
    """Train a short trial, from a file if that is given, and return what it computed."""
    fit, run, epochs = build_short(training, trial, file, at_check)
    epochs.looks = False
    if not epochs.by_hand:
        epochs.first *= LONGER
    if saved is not None:
        epochs.goal.checks = 1
    recorder = _Recorder(epochs.goal)
    with isolated(seed=trial.seed_for("order")):
        trainer = fit.trainer(last=[epochs, recorder])
        trainer.fit(fit.built.module, datamodule=fit.built.data, ckpt_path=saved, weights_only=True)
    ended = recorder.ended
    ended.curve = run.curve
    ended.saved_at = int(run.curve["step"][0])
    return ended


class _Recorder(Callback):
    """Records batches and weights of a short trial, and lets it be checked after its first step."""

    def __init__(self, goal):
        self.goal, self.ended = goal, _Ended()
        self._number = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.goal.is_early = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.ended.batches[self._number] = fingerprint(batch)
        self._number += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended.weights = {name: tensor.clone() for name, tensor in _tensors(pl_module).items()}

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._number = state_dict["number"]


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
