"""CheckpointCallback: saves a run now and then, so that it can go on from there as if it had not stopped."""

from __future__ import annotations

import math
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.position import ResumableLoader

MIN_SECONDS_WORTH_SAVING = 0.5  # when a run is left; a file of a small network takes 10 ms


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
        after_check: Called after each check that the run goes on from. If it raises, on all ranks, the run is saved and
            left. What raises on one alone, anywhere, says so by an attribute `now` that is true.
        pause: The step at which the run is saved and left, by `Paused`; of several ranks the first one's counts.
        say: Takes notices, in a line.

    Attributes:
        serves: Whether the run can be saved, once it has begun.
        seconds: What the run took before it was taken up; 0 for a new one.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        every: float,
        after_check: Callable[[], None] = lambda: None,
        pause: Callable[[], float] = lambda: math.inf,
        say: Callable[[str], None] = print,
    ):
        self.path, self.about, self.every = path, dict(about), every
        self.after_check, self.pause, self.say = after_check, pause, say
        self.seconds, self._began, self._saved = 0.0, time.monotonic(), time.monotonic()
        self._loader: ResumableLoader | None = None
        self._position: dict[str, Any] | None = None
        self._checked: int | None = None
        self._saving = self._read_back = self._paused = False

    @property
    def supports(self) -> bool:
        return self._loader is not None

    def checked(self, step: int) -> None:
        """To be called at the end of a check that the run goes on from, with its step."""
        if self.supports:
            self._checked = step  # other hooks of this step are still to come
        else:
            self.after_check()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        source = trainer.fit_loop._data_source
        make = source.dataloader
        source.dataloader = lambda: self._resumable(trainer, make())

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
        if self._checked is None:
            return
        step, self._checked = self._checked, None
        since, pause = ranks.on_rank_zero(lambda: (time.monotonic() - self._saved, self.pause()))
        try:
            self.after_check()
            if step >= pause:
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
        part = self.path.with_suffix(".part")
        try:
            self._saving = True
            self._write(trainer, part)
        except Exception as error:  # whatever it is (a full disk, a state that cannot be pickled): no reason to stop
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
            if ranks.is_rank_loss(error):
                raise
            self.say(f"warning: cannot save a checkpoint ({why}); training goes on")
            with suppress(OSError):
                part.unlink(missing_ok=True)
        finally:
            self._saving, self._saved = False, time.monotonic()

    def _write(self, trainer: Trainer, path: Path) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if not batches.ready == batches.completed == self._loader.taken:
            raise RuntimeError(f"batch {batches.ready} is not the loader's {self._loader.taken}")
        trainer.save_checkpoint(path, weights_only=False)
        ranks.on_rank_zero(lambda: self._keep(path, type(trainer.lightning_module).__name__), Exception)

    def _keep(self, path: Path, owner: str) -> None:
        if not self._read_back:  # once a run: a module may save what cannot be loaded safely
            if found := why_unusable(path, self.about):
                raise RuntimeError(f"what {owner} saves {found}")
            self._read_back = True
        with path.open("rb") as file:
            os.fsync(file.fileno())  # else a power failure may leave an empty file in place of the last one
        os.replace(path, self.path)

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


def why_unusable(path: Path, about: Mapping[str, Any]) -> str | None:
    """Why a file is no checkpoint of the run that `about` tells of; None if it is one. Nothing in it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not compare checksums
            whole = archive.testzip() is None
        saved = torch.load(path, map_location="cpu", weights_only=True) if whole else {}
        found = saved["callbacks"][CheckpointCallback.__qualname__]["about"]
    except Exception:  # whatever a file that is none, or half of one, makes of it
        return "cannot be read"
    return None if found == dict(about) else "is of another study or configuration"


def steps_saved(path: Path) -> int | None:
    """The optimizer steps after which a file was written; None if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    except Exception:  # as in `why_unusable`, which says so where the file would be used; until then it is left alone
        return None
