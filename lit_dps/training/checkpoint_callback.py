"""CheckpointCallback: saves a run now and then, so that it can go on from there as if it had not
stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Status
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.checkpoint_files import MIN_SECONDS_WORTH_SAVING, CheckpointFile
from lit_dps.training.hidden_state import capture_attributes, restore_attributes
from lit_dps.training.rng_state import capture, restore
from lit_dps.training.trainable_state import capture_trainable, prepare_trainable, restore_trainable


class Paused(Exception):
    """The run was left where it pauses."""


class CheckpointCallback(Callback):
    """Saves the trainer's checkpoint after a check, when everything of that step is done.

    With what Lightning saves (weights, optimizer, schedule, steps, the states of module, data
    module and callbacks) go the position in the training data, the states of all random number
    generators, which weights are trained in which groups and modes (`capture_trainable`), and what
    module, data module and callbacks keep beside what Lightning saves of them
    (`capture_attributes`). `Trainer.fit` with the file as `ckpt_path` and a new callback goes on,
    equal to the last bit. Several ranks save together, into rank 0's file.

    Not saved are runs of loaders that `ResumableLoader` does not serve, with a schedule that
    follows a metric, with train dataloaders that are made anew, or of several devices in another
    way than `SharedBatchDDP`: they begin anew.

    Args:
        file: Where the run is saved.
        every: Seconds of training between two files.
        run: Where it pauses, it is saved and left, by `Paused`.
        at_check: Called after each check that the run goes on from. If it raises, on all ranks, the
            run is saved and left. What raises on one alone, anywhere, says so by an attribute `now`
            that is true.

    Attributes:
        can_save: Whether the run can be saved, once it has begun.
        seconds: What the run took before it was taken up; 0 for a new one.
    """

    def __init__(
        self,
        file: CheckpointFile,
        every: float,
        run: Attempt,
        at_check: Callable[[], None] = lambda: None,
    ):
        self.file, self.every, self.run, self.at_check = file, every, run, at_check
        self.seconds, self._began, self._saved = 0.0, time.monotonic(), time.monotonic()
        self._loader: ResumableLoader | None = None
        self._position: dict[str, Any] | None = None
        self._trainable: dict[str, Any] = {}
        self._checked = self._saving = self._paused = False

    @property
    def can_save(self) -> bool:
        return self._loader is not None

    def checked(self) -> None:
        """To be called at the end of a check that the run goes on, or pauses, from."""
        if self.can_save:
            self._checked = True  # other hooks of this step are still to come
        else:
            self.at_check()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._trainer = trainer
            lightning_private.replace_dataloader(
                trainer, lambda loader: self._resumable(trainer, loader)
            )

    def _resumable(self, trainer: Trainer, loader: Any) -> Any:
        ours = trainer.world_size == 1 or isinstance(trainer.strategy, SharedBatchDDP)
        once = not (trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs)
        follows = any(
            config.reduce_on_plateau for config in trainer.lr_scheduler_configs
        )  # its metrics are not saved
        if ours and once and not follows and ResumableLoader.supports(loader):
            owners = (
                trainer.lightning_module,
                trainer.datamodule,
                *filter(_users, trainer.callbacks),
            )
            self._loader = ResumableLoader(
                loader,
                owners,
                lambda: self._between(trainer),
                self._position,
                lambda: self._put_back(trainer),
            )
            return self._loader
        if self._position is not None:
            raise ValueError("the position in the training data cannot be set")
        return loader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._position is not None:
            prepare_trainable(self._trainable, trainer, pl_module)

    def _put_back(self, trainer: Trainer) -> None:
        """Restore the trained parameters, groups and modes, before the first step of a resumed
        run."""
        restore_trainable(self._trainable, trainer, trainer.lightning_module)

    def _between(self, trainer: Trainer) -> None:
        if not self._checked:
            return
        self._checked = False
        since = ranks.on_rank_zero(lambda: time.monotonic() - self._saved)
        try:
            self.at_check()
            if self.run.status is Status.PAUSED:
                raise Paused
        except BaseException as left:
            self._paused = isinstance(left, Paused)
            if since >= min(MIN_SECONDS_WORTH_SAVING, self.every) and not getattr(
                left, "now", False
            ):
                self._save(trainer)
            raise
        if since >= self.every:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._saving = True
        try:
            self.file.write(
                lambda part: self._write(trainer, part), type(trainer.lightning_module).__name__
            )
        finally:
            self._saving, self._saved = False, time.monotonic()

    def _write(self, trainer: Trainer, path: Path) -> None:
        begun, completed = lightning_private.batches_trained(trainer)
        if not begun == completed == self._loader.taken:
            raise RuntimeError(f"batch {begun} is not the loader's {self._loader.taken}")
        trainer.save_checkpoint(path, weights_only=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._position is not None and not self._paused:  # a pause is no news
            self.file.say(f"{self.file.about['name']} goes on from step {trainer.global_step}")
        self._position, self._paused = None, False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leaves out the arguments of module and data module: any objects, and given anew."""
        for owner in (pl_module, trainer.datamodule) if self._saving else ():
            for key in ("NAME", "KEY", "TYPE"):
                checkpoint.pop(getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{key}", None), None)

    def state_dict(self) -> dict[str, Any]:
        if not self._saving:  # a checkpoint of somebody else's
            return {}
        seconds = self.seconds + time.monotonic() - self._began
        positions = ranks.all_gather(self._loader.position())
        trainer = self._trainer
        trainable = capture_trainable(trainer, trainer.lightning_module)
        state = {"about": self.file.about, "seconds": seconds, "positions": positions}
        return state | {"paused": self._paused, "trainable": trainable}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position, self.seconds = state_dict["positions"][ranks.rank()], state_dict["seconds"]
        self._paused = state_dict["paused"]
        if "trainable" not in state_dict:
            raise ValueError("an earlier version did not save which weights are trained")
        self._trainable = state_dict["trainable"]
        if self._loader is not None:
            # A module or callback that reads the length of training causes the loader to be made
            # before this.
            self._loader.continue_at(self._position)


def _users(callback: Callback) -> bool:
    """Whether a callback is neither ours, which all save what they need, nor Lightning's."""
    return type(callback).__module__.split(".")[0] not in ("lit_dps", "lightning")


class ResumableLoader(CombinedLoader):
    """Stands around a training loader in Lightning's loop, tells when that is between two batches,
    and goes on there.

    A position is reached by repeating the pass over the data from the states that the random number
    generators had when it began, without training on what comes. Of an `EndlessLoader` these are
    indices alone.

    Args:
        loader: The loader; `supports` says which.
        owners: Objects whose generators and attributes belong to the position, beside the loader's
            own generators.
        between: Called when all of the last batch is done and nothing of the next one has begun.
        position: Where to go on, from an earlier `position()` of a loader alike.
        put_back: Called once, before the first batch of a resumed loader.
    """

    def __init__(
        self,
        loader: Any,
        owners: tuple[Any, ...] = (),
        between: Callable[[], None] = lambda: None,
        position: dict[str, Any] | None = None,
        put_back: Callable[[], None] = lambda: None,
    ):
        super().__init__(loader, "max_size_cycle")  # as Lightning's own
        self.owners, self.between, self._goal = owners, between, position
        self.put_back = put_back
        self._now: dict[str, Any] | None = None
        self._given = self._fetched = 0

    @staticmethod
    def supports(loader: Any) -> bool:
        """Whether a loader gives the same batches from the same states: ours, and a DataLoader that
        keeps no more."""
        return isinstance(loader, EndlessLoader) or (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and not loader.persistent_workers
            and not hasattr(loader, "state_dict")  # Lightning takes these up itself
        )

    @property
    def taken(self) -> int:
        """Batches of this pass that were trained on, between two batches."""
        return self._given - self._ahead

    def continue_at(self, position: dict[str, Any]) -> None:
        """Set the position to resume from. Raises ValueError if a batch was yielded already."""
        if self._fetched:
            raise ValueError(
                "the position in the training data cannot be set: a batch was taken before"
            )
        self._goal = position

    def position(self) -> dict[str, Any]:
        """Where the run stands between two batches: plain numbers and tensors."""
        now = {"now": capture(*self._keepers), "kept": capture_attributes(*self.owners)}
        return {"start": self._start, "first": self._first, "taken": self.taken, **now}

    @property
    def _keepers(self) -> tuple[Any, ...]:
        return (*self.owners, self.iterables)  # Lightning may put another loader in place

    def __iter__(self) -> ResumableLoader:
        if self._now is not None:
            # The loader restarts before its first batch after a resume. That batch was prefetched
            # and is dropped.
            self._goal, self._now = self._now, None
        self._start = capture(*self._keepers)
        super().__iter__()
        self._given = self._fetched = 0
        self._ahead = (
            1 if sized_len(self) is None else 0
        )  # Lightning fetches one ahead to find an end
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if (
            self._goal is not None
        ):  # not before: a sampler is told its epoch after the loader was begun
            self._go_on(self._goal)
        if self._given == 0:
            self._first = capture(*self._keepers)  # a sampler draws its order here
        if self._fetched >= self._ahead:
            if (
                self._now is not None
            ):  # not before: what is drawn when training starts was drawn before
                restore(self._now["now"], *self._keepers)
                restore_attributes(self._now["kept"], *self.owners)
                self.put_back()
                self._now = None
            self.between()
        batch = super().__next__()
        self._fetched, self._given = self._fetched + 1, self._given + 1
        return batch

    def _go_on(self, position: dict[str, Any]) -> None:
        self._goal = None
        restore(position["start"], *self._keepers)
        iter(self)
        restore(position["first"], *self._keepers)
        for _ in range(position["taken"]):
            try:
                super().__next__()
            except StopIteration:
                raise ValueError(
                    f"the training data end before batch {position['taken']}"
                ) from None
        self._given, self._first, self._now = position["taken"], position["first"], position
