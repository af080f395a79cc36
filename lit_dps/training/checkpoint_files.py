"""Checkpoints: where the trials of a study are saved, and what a file has to be to be used."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch

from lit_dps.core.racing import needs_no_rerun
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.parallel import ranks

MIN_SECONDS_WORTH_SAVING = 0.5  # when a run is left; a file of a small network takes 10 ms


def _tell(text: str) -> None:
    if ranks.rank() == 0:
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one study: a folder a cell, a file a trial.

    Attributes:
        folder: The study's folder; others of the same name, deleted since, may have left files
            there.
        study: What tells the study from all others; only the first of several ranks has to know.
        minutes: Minutes of training between two files of a trial.
        say: Takes notices, in a line; all ranks give them.
    """

    folder: Path
    study: str | None
    minutes: float
    say: Callable[[str], None] = _tell
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    @property
    def seconds(self) -> float:
        return 60 * self.minutes

    def path(self, trial: Trial) -> Path:
        return self.folder / str(trial.cell) / f"{trial.file_name}.ckpt"

    def file(self, trial: Trial, settings: Mapping[str, Any]) -> CheckpointFile:
        """The file of a run of this trial, and what it tells of the run: equal runs alone go on
        from it.

        The settings are all that the engine was given, also what changes no result but what is in
        the file.
        """
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        everything = {
            **settings,
            **versions,
            "threads": torch.get_num_threads(),
            "ranks": ranks.world(),
        }
        text = json.dumps(everything, sort_keys=True, default=str)
        about = {
            "name": str(trial),
            "study": self.study,
            "seed": trial.seed,
            "params": dict(trial.params),
            "settings": hashlib.sha256(text.encode()).hexdigest(),
        }
        return CheckpointFile(self.path(trial), about, self.say_once)

    def find(self, trial: Trial, about: Mapping[str, Any]) -> Path | None:
        """The file that a trial can go on from. One that does not serve is told of and removed."""
        path = self.path(trial)
        if not path.exists():
            return None
        if not (found := why_unusable(path, about)):
            return path
        self.say(f"{about['name']} begins anew: its checkpoint {found}")
        self.remove(trial)
        return None

    def say_once(self, text: str) -> None:
        """A notice that is not repeated by this process."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def on_result_stored(self, result: TrialResult, limit: float) -> None:
        """Removes what nobody needs any more, now that a result is stored.

        `limit` is the step that trials of its cell have to reach; one that paused before has to go
        on.
        """
        if needs_no_rerun(result.status, result.steps_run, limit):
            self.remove(result.trial)
        if result.status is Status.COMPLETE and not result.trial.repeat:  # repeats do not race
            for path in self.path(result.trial).parent.glob("point-*.ckpt"):
                if (steps_saved(path) or 0) >= limit:
                    _remove(path)

    def remove(self, trial: Trial) -> None:
        """Removes what there is of a trial."""
        _remove(self.path(trial))


class CheckpointFile:
    """The file of one run: written whole or not at all, and read back once. Of several ranks the
    first one's.

    `about` tells what the run is (see `why_unusable`), `say` takes notices, in a line.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], say: Callable[[str], None]):
        self.path, self.about, self.say, self._read_back = path, about, say, False

    def write(self, save: Callable[[Path], None], owner: str) -> None:
        """Replaces the file by what `save` writes to a path, on all ranks; a notice names the
        state's owner.

        What goes wrong is told, and nothing is raised but that a rank is lost.
        """
        part = self.path.with_suffix(".part")
        try:
            save(part)
            ranks.on_rank_zero(lambda: self._keep(part, owner), Exception)
        # whatever it is (a full disk, a state that cannot be pickled): no reason to stop
        except Exception as error:
            if ranks.is_rank_loss(error):
                raise
            why = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else str(error).split("\n")[0]
            )
            self.say(f"warning: cannot save a checkpoint ({why}); training goes on")
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _keep(self, part: Path, owner: str) -> None:
        if not self._read_back:  # once a run: a module may save what cannot be loaded safely
            if found := why_unusable(part, self.about):
                raise RuntimeError(f"what {owner} saves {found}")
            self._read_back = True
        with part.open("rb") as file:
            os.fsync(
                file.fileno()
            )  # else a power failure may leave an empty file in place of the last one
        os.replace(part, self.path)


def why_unusable(path: Path, about: Mapping[str, Any]) -> str | None:
    """Why a file is no checkpoint of the run that `about` tells of; None if it is one. Nothing in
    it is executed."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not compare checksums
            whole = archive.testzip() is None
        saved = torch.load(path, map_location="cpu", weights_only=True) if whole else {}
        found = (
            saved["about"]
            if "about" in saved
            else saved["callbacks"]["CheckpointCallback"]["about"]
        )
    except Exception:  # whatever a file that is none, or half of one, makes of it
        return "cannot be read"
    return None if found == dict(about) else "is of another study or configuration"


def steps_saved(path: Path) -> int | None:
    """The optimizer steps after which a file was written; None if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    # as in `why_unusable`, which says so where the file would be used; until then it is left alone
    except Exception:
        return None


def clear(folder: Path) -> None:
    """Removes all that `Checkpoints` wrote into a study's folder, and the folder if it is empty
    then."""
    for name in ("point-*.*", "repeat-*.*"):
        for path in folder.glob(f"B=* S=*/{name}"):
            _remove(path)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _remove(path: Path) -> None:
    with suppress(OSError):  # a file more or less changes no result
        for file in (path.with_suffix(".ckpt"), path.with_suffix(".part")):
            file.unlink(missing_ok=True)
        path.parent.rmdir()
