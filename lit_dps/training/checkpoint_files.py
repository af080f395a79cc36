"""Checkpoint files of a study: where they are, when they are valid, and when they are removed.

For example, trial 3 of the cell B=16 S=0.5 is saved every 10 minutes to
`<folder>/B=16 S=0.5/point-3.ckpt`. After an interruption the trial resumes from this file, but only
if the file is complete and belongs to the same study, with the same settings, versions, code and
data.
Otherwise the trial restarts. A checkpoint never changes a result, so an error while writing it is
reported and training continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch

from lit_dps.core.environment import changes_since
from lit_dps.core.errors import first_line
from lit_dps.core.racing import is_final
from lit_dps.core.trial import Trial, TrialResult
from lit_dps.parallel import ranks

# Entry of a file's identity: hashes of code and data. Files of earlier versions lack it.
ENVIRONMENT = "environment"

# A shorter run is not saved when it is interrupted. A file of a small network takes 10 ms.
MIN_SECONDS_WORTH_SAVING = 0.5


def _print_on_rank_zero(text: str) -> None:
    if ranks.rank() == 0:
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint files of one study: a folder per cell, a file per trial.

    Attributes:
        folder: The study's folder. It may have files of a deleted study of the same name.
        study: Identifies the study among all others. With several ranks, only rank 0 needs it.
        minutes: Minutes of training between two files of a trial.
        report: Takes messages of one line; all ranks call it.
        environment: Hashes of the code and the data that train the trials, as entries of
            `lit_dps.core.environment`; empty if they are unknown.
    """

    folder: Path
    study: str | None
    minutes: float
    report: Callable[[str], None] = _print_on_rank_zero
    environment: Mapping[str, Any] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set, init=False, repr=False)

    def path(self, trial: Trial) -> Path:
        """Return the path of a trial's file."""
        return self.folder / trial.cell.stored_name / f"{trial.file_name}.ckpt"

    def file(self, trial: Trial, settings: Mapping[str, Any]) -> CheckpointFile:
        """Return the file of a trial. A run resumes from it only if its identity agrees.

        Args:
            trial: The trial.
            settings: All settings of the engine, including those that change the file only.
        """
        environment = {
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "threads": torch.get_num_threads(),
            "ranks": ranks.world(),
        }
        text = json.dumps({**settings, **environment}, sort_keys=True, default=str)
        identity = {
            "name": trial.stored_name,
            "study": self.study,
            "seed": trial.seed,
            "params": dict(trial.params),
            "settings": hashlib.sha256(text.encode()).hexdigest(),
        }
        if self.environment:
            identity[ENVIRONMENT] = dict(self.environment)
        return CheckpointFile(self.path(trial), identity, self._report_once, 60 * self.minutes)

    def _report_once(self, text: str) -> None:
        """Report a message, unless this process has already reported it."""
        if text not in self._reported:
            self._reported.add(text)
            self.report(text)

    def remove_unneeded(self, result: TrialResult, limit: float) -> None:
        """Remove files that no trial needs any more, after a result was stored.

        Args:
            result: The stored result.
            limit: The cost that trials of its cell have to reach. A trial that paused earlier keeps
                its file.
        """
        if is_final(result, limit):
            self.remove(result.trial)
        # Repeats do not race, so they keep no trial from running.
        if not result.steps or not result.cost or result.trial.repeat:
            return
        # The trials of a cell take about as many examples or seconds a step.
        limit_in_steps = limit / result.cost * result.steps
        for path in self.path(result.trial).parent.glob("point-*.ckpt"):
            if (steps_saved(path) or 0) >= limit_in_steps:
                _remove(path)

    def remove(self, trial: Trial) -> None:
        """Remove the file of a trial, if it exists."""
        _remove(self.path(trial))


class CannotResume(RuntimeError):
    """A checkpoint cannot be restored. Its file is removed, so that the run can begin again."""


class CheckpointFile:
    """The checkpoint file of one run. It is written completely or not at all, by rank 0.

    Args:
        path: The file.
        identity: Identifies the run: name, study, seed, parameters and settings of the trial, and
            hashes of code and data.
        report: Takes messages of one line.
        interval: Seconds of training between two files.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        report: Callable[[str], None],
        interval: float,
    ):
        self.path = path
        self.identity = identity
        self.report = report
        self.interval = interval
        self._is_readable = False

    @property
    def name(self) -> str:
        """The name of the run's trial, for messages."""
        # Stored names keep the former word for a sample.
        return self.identity["name"].replace(" point ", " sample ")

    def is_due(self, age: float, run_ends: bool = False) -> bool:
        """Return True if a run is to be saved after a validation.

        Args:
            age: Seconds since the last file, or since the run began.
            run_ends: Whether the run ends or pauses here. Then it is saved, unless it is faster to
                train its steps again.
        """
        min_age = self.interval
        if run_ends:
            min_age = min(MIN_SECONDS_WORTH_SAVING, self.interval)
        return age >= min_age

    def find(self) -> Path | None:
        """Return the path if the run can resume from the file, else None.

        An invalid file is reported and removed.
        """
        if not self.path.exists():
            return None
        reason = why_unusable(self.path, self.identity)
        if reason is None:
            return self.path
        self.report(f"{self.name} restarts: its checkpoint {reason}")
        self.remove()
        return None

    def remove(self) -> None:
        """Remove the file, if it exists."""
        _remove(self.path)

    def reject(self, error: Exception) -> None:
        """Remove the file after an error while the run was restored from it, and report that."""
        self.remove()
        reason = first_line(error)
        self.report(f"{self.name} restarts: it cannot resume from its checkpoint ({reason})")

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn an error of the block, which restores the run, into `CannotResume`.

        The checkpoint may have another state than the module takes, such as the state of another
        version of its code.
        """
        try:
            yield
        except Exception as error:  # the module's code may raise anything
            # PyTorch's allocators raise a RuntimeError on a CPU. The checkpoint is good then.
            failed_allocation = isinstance(error, RuntimeError) and "alloc" in str(error).lower()
            if failed_allocation or isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            self.reject(error)
            raise CannotResume(first_line(error)) from error

    def write(self, save: Callable[[Path], None], module: str) -> None:
        """Replace the file. Call this on all ranks.

        Errors are reported and do not stop training, such as a full disk or a state that cannot be
        pickled. Only the loss of a rank is raised.

        Args:
            save: Writes a file to a path.
            module: Name of the module's class, for messages.
        """
        part = self.path.with_suffix(".part")
        try:
            save(part)
            ranks.on_rank_zero(lambda: self._replace_by(part, module), Exception)
        except Exception as error:
            if ranks.is_rank_loss(error):
                raise
            reason = first_line(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            self.report(f"warning: cannot save a checkpoint ({reason}); training continues")
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _replace_by(self, part: Path, module: str) -> None:
        """Replace the file by a new one. The first file of a run is read back to check it."""
        if not self._is_readable:
            # A module may save objects that cannot be loaded safely.
            reason = why_unusable(part, self.identity)
            if reason is not None:
                raise RuntimeError(f"what {module} saves {reason}")
            self._is_readable = True
        # Without this, a power failure may replace the last file by an empty one.
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, self.path)


def why_unusable(path: Path, identity: Mapping[str, Any]) -> str | None:
    """Return why a file is no checkpoint of a run; None if it is one. No code in it is executed.

    Args:
        path: The file.
        identity: Identifies the run (see `CheckpointFile`).
    """
    try:
        # torch itself does not compare checksums.
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return "cannot be read"
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if "about" not in saved:
            # Lightning's trainer wrote the file, with the state of `CheckpointCallback`.
            saved = saved["callbacks"]["CheckpointCallback"]
        saved_identity = dict(saved["about"])
    # A damaged or foreign file may raise any error.
    except Exception:
        return "cannot be read"
    saved_environment = saved_identity.pop(ENVIRONMENT, {})
    if saved_identity != {key: identity[key] for key in identity if key != ENVIRONMENT}:
        return "is of another study or configuration"
    # A study whose changed code was accepted may run with its former code again.
    changes = changes_since([saved_environment], identity.get(ENVIRONMENT, {}))
    if changes:
        return f"is of another version of {', '.join(changes)}"
    return None


def steps_saved(path: Path) -> int | None:
    """Return the optimizer steps after which a file was written; None if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    # As in `why_unusable`, which reports the error when a trial is about to use the file.
    except Exception:
        return None


def clear_checkpoints(folder: Path) -> None:
    """Remove all checkpoint files from a study's folder, and the folder if it is empty then."""
    for pattern in ("point-*.*", "repeat-*.*"):
        for path in folder.glob(f"B=* S=*/{pattern}"):
            _remove(path)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _remove(path: Path) -> None:
    """Remove a checkpoint and its unfinished part. An error is ignored: it changes no result."""
    with suppress(OSError):
        for file in (path.with_suffix(".ckpt"), path.with_suffix(".part")):
            file.unlink(missing_ok=True)
        path.parent.rmdir()
