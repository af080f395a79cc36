"""Checkpoints: where the trials of a study are saved, and what a file has to be to be used."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch

from lit_dps.parallel import ranks
from lit_dps.training.checkpoint import steps_saved, why_unusable
from lit_dps.trial import Status, Trial, TrialResult


def _tell(text: str) -> None:
    if ranks.rank() == 0:
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one study: a folder a cell, a file a trial.

    Attributes:
        folder: The study's folder; others of the same name, deleted since, may have left files there.
        study: What tells the study from all others; only the first of several ranks has to know.
        minutes: Minutes of training between two files of a trial.
        say: Takes notices, in a line; all ranks give them.
    """

    folder: Path
    study: str | None
    minutes: float
    say: Callable[[str], None] = _tell
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def path(self, trial: Trial) -> Path:
        return self.folder / str(trial.cell) / f"point-{trial.point}.ckpt"

    def about(self, trial: Trial, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What a file tells of its run, plain. Equal runs alone go on from it.

        Args:
            trial: The trial.
            settings: All that the engine was given, also what changes no result but what is in the file.
        """
        versions = {"torch": torch.__version__, "lightning": lightning.__version__}
        everything = {**settings, **versions, "threads": torch.get_num_threads(), "ranks": ranks.world()}
        text = json.dumps(everything, sort_keys=True, default=str)
        return {
            "name": f"{trial.cell} point {trial.point}",
            "study": self.study,
            "seed": trial.seed,
            "params": dict(trial.params),
            "settings": hashlib.sha256(text.encode()).hexdigest(),
        }

    def find(self, trial: Trial, about: Mapping[str, Any]) -> Path | None:
        """The file that a trial can go on from. One that does not serve is told of and removed."""
        path = self.path(trial)
        if not path.exists():
            return None
        if found := why_unusable(path, about):
            self.say(f"{about['name']} begins anew: its checkpoint {found}")
            self.remove(trial)
            return None
        return path

    def say_once(self, text: str) -> None:
        """A notice that is not repeated by this process."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def on_result_stored(self, result: TrialResult, limit: float) -> None:
        """Removes what nobody needs any more, now that a result is stored.

        Args:
            result: The result.
            limit: The step that trials of its cell have to reach; one that paused before has to go on.
        """
        if result.status is not Status.OUTRACED or result.steps_run >= limit:
            self.remove(result.trial)
        if result.status is Status.COMPLETE:
            for path in self.path(result.trial).parent.glob("point-*.ckpt"):
                if (steps_saved(path) or 0) >= limit:
                    _remove(path)

    def remove(self, trial: Trial) -> None:
        """Removes what there is of a trial."""
        _remove(self.path(trial))


def clear(folder: Path) -> None:
    """Removes all that `Checkpoints` wrote into a study's folder, and the folder if it is empty then."""
    for path in folder.glob("B=* S=*/point-*.*"):
        _remove(path)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _remove(path: Path) -> None:
    with suppress(OSError):  # a file more or less changes no result
        for file in (path.with_suffix(".ckpt"), path.with_suffix(".part")):
            file.unlink(missing_ok=True)
        path.parent.rmdir()
