"""CheckpointCallback: saves a run from time to time, so that it can resume exactly.

A resumed run equals an uninterrupted run to the last bit. Lightning's checkpoint alone does not
achieve this. For example, a run is interrupted at step 1000, after batch 37 of a shuffled epoch.
Lightning would restore the weights and then shuffle again, so batch 38 would differ. This file
therefore saves, in addition:

- the position in the training data (`ResumableLoader`, below);
- the states of all random number generators (`hidden_state`);
- which parameters are trained, in which groups, and the modes of submodules
  (`capture_trainable`): a callback may unfreeze a backbone in epoch 5 (Lightning issue 21901);
- attributes of module, data module and callbacks (`hidden_state`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Status
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.pruning.mask import hidden_tensors
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.hidden_state import (
    capture_attributes,
    capture_rng_state,
    restore_attributes,
    restore_rng_state,
)
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.trainer_rules import follows_metric
from lit_dps.training.trainer_state import user_callbacks

Position = dict[str, Any]


class Paused(Exception):
    """Ends a fit because the run pauses."""


class CheckpointCallback(Callback):
    """Saves the trainer's checkpoint after a validation, and stops a trial that was asked to stop.

    It does both when all hooks of that step are done.

    To resume, call `Trainer.fit` with the file as `ckpt_path` and a new callback. Several ranks
    save together, into the file of rank 0.

    These runs are not saved, and restart: runs of loaders that `ResumableLoader` does not support,
    with a schedule that follows a metric, with train dataloaders that are reloaded, or on several
    devices with another strategy than `SharedBatchDDP`.

    Args:
        attempt: The attempt. When it pauses, it is saved, and the fit ends with `Paused`.
        file: The file of the run; None saves nothing.
        raise_if_stopped: Called after each validation after which the run continues. If it raises
            an error, on all ranks, the run is saved and the fit ends. If only one rank raises, the
            error must have a true attribute `now`.

    Attributes:
        can_save: Whether the run can be saved, after it has begun.
        seconds: Seconds that the run took before it resumed; 0 for a new run.
    """

    def __init__(
        self,
        attempt: Attempt,
        file: CheckpointFile | None = None,
        raise_if_stopped: Callable[[], None] = lambda: None,
    ):
        self.attempt = attempt
        self.file = file
        self.raise_if_stopped = raise_if_stopped
        self.seconds = 0.0
        self._began = time.monotonic()
        self._last_saved = self._began
        self._loader: ResumableLoader | None = None
        # The state to resume from, between loading and the first step.
        self._position: Position | None = None
        self._trainable: dict[str, Any] = {}
        self._is_after_validation = False
        self._is_saving = False
        self._is_paused = False

    @property
    def can_save(self) -> bool:
        return self._loader is not None

    def after_validation(self) -> None:
        """Stop or save the run if it is time. Call this after a validation that does not end it.

        Other hooks of this step are still to come, so a run is saved before the next batch.
        """
        if self.can_save:
            self._is_after_validation = True
        else:
            self.raise_if_stopped()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.file is not None:
            self._trainer = trainer
            lightning_private.replace_dataloader(trainer, self._resumable)

    def _resumable(self, loader: Any) -> Any:
        """Return a loader that can resume; the loader itself if the run cannot be saved."""
        trainer = self._trainer
        if not _can_resume(trainer, loader):
            if self._position is not None:
                raise ValueError("the position in the training data cannot be set")
            return loader
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        self._loader = ResumableLoader(
            loader,
            (trainer.lightning_module, data, *user_callbacks(trainer)),
            self._between_batches,
            self._position,
            self._restore_trainable,
        )
        return self._loader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._position is not None:
            prepare_trainable(self._trainable, trainer, pl_module)

    def _restore_trainable(self) -> None:
        """Restore trained parameters, groups and modes, before the first step after a resume."""
        restore_trainable(self._trainable, self._trainer, self._trainer.lightning_module)

    def _between_batches(self) -> None:
        """Save the run if it is time, or if it ends here. Called between two batches."""
        if not self._is_after_validation:
            return
        self._is_after_validation = False
        age = ranks.on_rank_zero(lambda: time.monotonic() - self._last_saved)
        try:
            if self.attempt.status is Status.PAUSED:
                raise Paused
            self.raise_if_stopped()
        except BaseException as error:
            self._is_paused = isinstance(error, Paused)
            # With `now`, the other ranks do not take part in saving.
            if self._file.is_due(age, run_ends=True) and not getattr(error, "now", False):
                self._save()
            raise
        if self._file.is_due(age):
            self._save()
        # The next step begins with the loading of its batch, which follows.
        stopwatch_of(self._trainer).restart_phase()

    @property
    def _file(self) -> CheckpointFile:
        assert self.file is not None
        return self.file

    def _save(self) -> None:
        self._is_saving = True
        try:
            self._file.write(self._write, type(self._trainer.lightning_module).__name__)
        finally:
            self._is_saving = False
            self._last_saved = time.monotonic()

    def _write(self, path: Path) -> None:
        assert self._loader is not None
        begun, completed = lightning_private.batches_trained(self._trainer)
        if not begun == completed == self._loader.taken:
            raise RuntimeError(f"batch {begun} is not the loader's {self._loader.taken}")
        self._trainer.save_checkpoint(path, weights_only=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The end of a pause is not reported.
        if self._position is not None and not self._is_paused:
            self._file.report(f"{self._file.name} resumes from step {trainer.global_step}")
        self._position = None
        self._is_paused = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave out the arguments of module and data module.

        They may be any objects, and a resumed run gets them from its configuration.
        """
        if not self._is_saving:
            return
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        for owner in (pl_module, data):
            for attribute in ("NAME", "KEY", "TYPE"):
                key = getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{attribute}", None)
                if key is not None:
                    checkpoint.pop(key, None)

    def state_dict(self) -> dict[str, Any]:
        # Another callback may save a checkpoint too, which this state does not belong to.
        if not self._is_saving:
            return {}
        assert self._loader is not None
        return {
            "about": self._file.identity,
            "seconds": self.seconds + time.monotonic() - self._began,
            "positions": ranks.all_gather(self._loader.position()),
            "paused": self._is_paused,
            "trainable": capture_trainable(self._trainer, self._trainer.lightning_module),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = state_dict["positions"][ranks.rank()]
        self._position = position
        self.seconds = state_dict["seconds"]
        self._is_paused = state_dict["paused"]
        self._trainable = state_dict["trainable"]
        if self._loader is not None:
            # A module or callback has read the length of training, so the loader exists already.
            self._loader.continue_at(position)


def _can_resume(trainer: Trainer, loader: Any) -> bool:
    """Return True if the position in a loader can be saved, and everything else of the run."""
    if trainer.world_size > 1 and not isinstance(trainer.strategy, SharedBatchDDP):
        return False
    options: Any = trainer  # Lightning's stubs lack these attributes
    if options.overfit_batches or options.reload_dataloaders_every_n_epochs:
        return False
    # The metrics that a schedule follows are not saved.
    if follows_metric(trainer):
        return False
    return ResumableLoader.supports(loader)


class ResumableLoader(CombinedLoader):
    """Wraps a training loader in Lightning's loop, and can resume between any two batches.

    To reach a position, the loader repeats the pass over the data from the states that the random
    number generators had at its beginning, without training. With an `EndlessLoader`, this repeats
    indices only.

    Args:
        loader: A loader that `supports` accepts.
        owners: Objects whose generators and attributes belong to the position. The generators of
            the loader belong to it too.
        between: Called between two batches: after all hooks of the last batch, and before the next
            batch is fetched.
        position: Where to resume, from `position()` of an equal loader.
        put_back: Called once, before the first batch after a resume.
    """

    def __init__(
        self,
        loader: Any,
        owners: tuple[Any, ...] = (),
        between: Callable[[], None] = lambda: None,
        position: Position | None = None,
        put_back: Callable[[], None] = lambda: None,
    ):
        super().__init__(loader, "max_size_cycle")  # Lightning's default
        self.owners = owners
        self.between = between
        self.put_back = put_back
        # The position to resume from. First the loader goes to its batch (`_target`); right before
        # training it restores generators and attributes (`_pending`).
        self._target = position
        self._pending: Position | None = None
        self._yielded = 0  # batches since the beginning of the pass
        self._fetched = 0  # batches that this object has fetched for the loop
        self._ahead = 0

    @staticmethod
    def supports(loader: Any) -> bool:
        """Return True if a loader repeats its batches from the same states of the generators.

        Our `EndlessLoader` does, and a `DataLoader` without other state.
        """
        if isinstance(loader, EndlessLoader):
            return True
        return (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and not loader.persistent_workers
            and not hasattr(loader, "state_dict")  # Lightning restores such loaders itself
        )

    @property
    def taken(self) -> int:
        """Batches of this pass that were trained on. Valid between two batches."""
        return self._yielded - self._ahead

    def continue_at(self, position: Position) -> None:
        """Set the position to resume from. Raises ValueError if a batch was yielded already."""
        if self._fetched:
            raise ValueError(
                "the position in the training data cannot be set: a batch was taken before"
            )
        self._target = position

    def position(self) -> Position:
        """Return the position between two batches, as plain numbers and tensors.

        Returns:
            "start" and "first": states of the generators at the beginning of the pass and before
            its first batch. "taken": batches of the pass. "now" and "kept": states of the
            generators and attributes of the owners at the position.
        """
        return {
            "start": self._start,
            "first": self._first,
            "taken": self.taken,
            "now": capture_rng_state(*self._keepers),
            "kept": capture_attributes(*self.owners),
        }

    @property
    def _keepers(self) -> tuple[Any, ...]:
        """The objects with generators. Lightning may replace the loader meanwhile."""
        return (*self.owners, self.iterables)

    def __iter__(self) -> ResumableLoader:
        if self._pending is not None:
            # The loop begins another pass before its first batch after a resume. It has fetched
            # that batch already and drops it.
            self._target = self._pending
            self._pending = None
        self._start = capture_rng_state(*self._keepers)
        super().__iter__()
        self._yielded = 0
        self._fetched = 0
        # Lightning fetches one batch ahead to find the end of a loader without a length.
        self._ahead = int(sized_len(self) is None)
        return self

    def __next__(self) -> tuple[Any, int, int]:
        # Not in `__iter__`, because Lightning sets the epoch of a sampler after it began the pass.
        if self._target is not None:
            self._go_to(self._target)
        if self._yielded == 0:
            # A sampler draws its order with the first batch.
            self._first = capture_rng_state(*self._keepers)
        if self._fetched >= self._ahead:
            # Not earlier, because hooks that draw when training starts have drawn before the saved
            # state, too.
            if self._pending is not None:
                self._restore(self._pending)
            self.between()
        batch = super().__next__()
        self._fetched += 1
        self._yielded += 1
        return batch

    def _go_to(self, position: Position) -> None:
        """Repeat the pass up to a position."""
        self._target = None
        restore_rng_state(position["start"], *self._keepers)
        iter(self)
        restore_rng_state(position["first"], *self._keepers)
        for _ in range(position["taken"]):
            try:
                super().__next__()
            except StopIteration:
                message = f"the training data end before batch {position['taken']}"
                raise ValueError(message) from None
        self._yielded = position["taken"]
        self._first = position["first"]
        self._pending = position

    def _restore(self, position: Position) -> None:
        """Restore the generators and attributes of a position."""
        restore_rng_state(position["now"], *self._keepers)
        restore_attributes(position["kept"], *self.owners, is_resume=True)
        self.put_back()
        self._pending = None


# Which parameters a run trains


def capture_trainable(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return which parameters a running fit trains, as plain values.

    Returns:
        "requires_grad": whether each parameter is trained, by name. "modules": class and training
        mode of each submodule, by name. "optimizers": the class of each optimizer, and in "groups"
        the names of the parameters of each group; None for a parameter outside of the module.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    modules = {}
    for name, part in module.named_modules():
        modules[name] = type(part).__qualname__, part.training
    return {
        "requires_grad": {name: parameter.requires_grad for name, parameter in parameters},
        "modules": modules,
        "optimizers": [_groups(optimizer, module) for optimizer in trainer.optimizers],
    }


def prepare_trainable(state: dict[str, Any], trainer: Trainer, module: LightningModule) -> None:
    """Restore frozen parameters and the groups of optimizers, before their states are loaded.

    Call this after the optimizers were configured. The states contain the options of the groups.

    Raises:
        ValueError: if the optimizers differ, or if a parameter of a group is missing.
    """
    saved = state["optimizers"]
    if len(saved) != len(trainer.optimizers):
        raise ValueError(f"it has {len(trainer.optimizers)} optimizers, and had {len(saved)}")
    parameters = _parameters(module)
    for optimizer, saved_optimizer in zip(trainer.optimizers, saved, strict=True):
        current = _groups(optimizer, module)
        if current["class"] != saved_optimizer["class"]:
            saved_class = saved_optimizer["class"]
            raise ValueError(f"its optimizer is {current['class']}, and was {saved_class}")
        if current["groups"] != saved_optimizer["groups"]:
            optimizer.param_groups = _rebuilt(optimizer, saved_optimizer["groups"], parameters)
    for name, requires_grad in state["requires_grad"].items():
        if name in parameters:
            parameters[name].requires_grad_(requires_grad)


def restore_trainable(state: dict[str, Any], trainer: Trainer, module: LightningModule) -> None:
    """Restore frozen parameters and modes, before the first step.

    Hooks that run when training starts may have changed them since `prepare_trainable`.

    Raises:
        ValueError: if parameters, submodules or groups of optimizers differ from the saved ones.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_names(parameters, state["requires_grad"], "parameters")
    for name, parameter in parameters.items():
        if parameter.requires_grad != state["requires_grad"][name]:
            parameter.requires_grad_(state["requires_grad"][name])
    submodules = dict(module.named_modules())
    _check_names(submodules, state["modules"], "submodules")
    for name, submodule in submodules.items():
        saved_class, training = state["modules"][name]
        current_class = type(submodule).__qualname__
        if current_class != saved_class:
            raise ValueError(f"its {name} is {current_class}, and was {saved_class}")
        submodule.training = training
    if [_groups(optimizer, module) for optimizer in trainer.optimizers] != state["optimizers"]:
        raise ValueError("its optimizers have other parameter groups than they had")


def _check_names(current: dict[str, Any], saved: dict[str, Any], kind: str) -> None:
    """Raise ValueError if the names differ."""
    if current.keys() != saved.keys():
        names = ", ".join(sorted(current.keys() ^ saved.keys()))
        raise ValueError(f"it has other {kind} than it had: {names}")


def _parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors that an optimizer may train, by name, also from lists and dicts."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**hidden_tensors(module), **named}


def _groups(optimizer: Optimizer, module: LightningModule) -> dict[str, Any]:
    """Return the class of an optimizer, and the names of the parameters of each group."""
    names: dict[int, str] = {}
    for name, tensor in _parameters(module).items():
        names.setdefault(id(tensor), name)
    groups = []
    for group in optimizer.param_groups:
        groups.append([names.get(id(parameter)) for parameter in group["params"]])
    return {"class": type(optimizer).__qualname__, "groups": groups}


def _rebuilt(
    optimizer: Optimizer, groups: list[list[str | None]], parameters: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return groups with these parameters.

    A group gets the options of the current group with its number, or of the first group.
    """
    rebuilt = []
    for i, names in enumerate(groups):
        group = []
        for name in names:
            if name is None or name not in parameters:
                raise ValueError(f"a parameter of its optimizer is missing: {name}")
            group.append(parameters[name])
        number = i if i < len(optimizer.param_groups) else 0
        rebuilt.append({**optimizer.param_groups[number], "params": group})
    return rebuilt
