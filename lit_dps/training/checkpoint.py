"""CheckpointCallback: saves a run now and then, so that it can go on from there as if it had not stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.runs import Run
from lit_dps.training.checkpoints import MIN_SECONDS_WORTH_SAVING, CheckpointFile
from lit_dps.training.position import ResumableLoader
from lit_dps.trial import Status


class Paused(Exception):
    """The run was left where it pauses."""


class CheckpointCallback(Callback):
    """Saves the trainer's checkpoint after a check, when everything of that step is done.

    With what Lightning saves (weights, optimizer, schedule, steps, the states of module, data module and callbacks) go
    the position in the training data and the states of all random number generators. `Trainer.fit` with the file as
    `ckpt_path` and a new callback goes on, equal to the last bit.

    Several ranks save together: rank 0 reads and writes the file, and every rank's position is in it.

    Not saved are runs of loaders that `ResumableLoader` does not serve, with a schedule that follows a metric, with
    train dataloaders that are made anew, or of several devices in another way than `SharedBatchDDP`: they begin anew.

    Args:
        path: The file.
        about: What the run is, plain; see `why_unusable`.
        every: Seconds of training between two files.
        run: Where it pauses, it is saved and left, by `Paused`.
        at_check: Called after each check that the run goes on from. If it raises, on all ranks, the run is saved and
            left. What raises on one alone, anywhere, says so by an attribute `now` that is true.
        say: Takes notices, in a line.

    Attributes:
        can_save: Whether the run can be saved, once it has begun.
        seconds: What the run took before it was taken up; 0 for a new one.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        every: float,
        run: Run,
        at_check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ):
        self.about, self.every, self._writer = dict(about), every, CheckpointFile(path, about, say)
        self.run, self.at_check, self.say = run, at_check, say
        self.seconds, self._began, self._saved = 0.0, time.monotonic(), time.monotonic()
        self._loader: ResumableLoader | None = None
        self._position: dict[str, Any] | None = None
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
        if stage != "fit":
            return
        lightning_private.replace_dataloader(trainer, lambda loader: self._resumable(trainer, loader))

    def _resumable(self, trainer: Trainer, loader: Any) -> Any:
        ours = trainer.world_size == 1 or isinstance(trainer.strategy, SharedBatchDDP)
        once = not (trainer.overfit_batches or trainer.reload_dataloaders_every_n_epochs)
        follows = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)  # its metrics are not saved
        if ours and once and not follows and ResumableLoader.supports(loader):
            owners = (trainer.lightning_module, trainer.datamodule)
            self._loader = ResumableLoader(loader, owners, lambda: self._between(trainer), self._position)
            return self._loader
        if self._position is not None:
            raise ValueError("the position in the training data cannot be set")
        return loader

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
            if since >= min(MIN_SECONDS_WORTH_SAVING, self.every) and not getattr(left, "now", False):
                self.save(trainer)
            raise
        if since >= self.every:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes the file, whole or not at all; what goes wrong is told, and the run goes on.

        To be called between two batches, by all ranks.
        """
        self._saving = True
        try:
            self._writer.write(lambda part: self._write(trainer, part), type(trainer.lightning_module).__name__)
        finally:
            self._saving, self._saved = False, time.monotonic()

    def _write(self, trainer: Trainer, path: Path) -> None:
        begun, completed = lightning_private.batches_trained(trainer)
        if not begun == completed == self._loader.taken:
            raise RuntimeError(f"batch {begun} is not the loader's {self._loader.taken}")
        trainer.save_checkpoint(path, weights_only=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._position is not None and not self._paused:  # a pause is no news
            self.say(f"{self.about['name']} goes on from step {trainer.global_step}")
        self._position, self._paused = None, False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leaves out the arguments of module and data module: any objects, and given anew."""
        for owner in (pl_module, trainer.datamodule) if self._saving else ():
            for key in ("NAME", "KEY", "TYPE"):
                checkpoint.pop(getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{key}", None), None)

    def state_dict(self) -> dict[str, Any]:
        if not self._saving:  # a checkpoint of somebody else's
            return {}
        seconds = self.seconds + time.monotonic() - self._began
        positions = ranks.all_gather(self._loader.position())
        return {"about": self.about, "seconds": seconds, "positions": positions, "paused": self._paused}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position, self.seconds = state_dict["positions"][ranks.rank()], state_dict["seconds"]
        self._paused = state_dict["paused"]
