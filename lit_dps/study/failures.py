"""The trials of a study that failed: a file for each, and an end where nothing else happens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lit_dps.errors import StorageError, UserError
from lit_dps.files import replacing
from lit_dps.trial import Cell, Status, TrialResult

FIRST = 3  # results of which one at least has to be none of a failed trial
FAILED = 1  # exit code of a study with failed trials


class AllFail(UserError):
    """The first trials of a run of a study failed, every one."""


class Failures:
    """Takes all results of one run of a study.

    Args:
        folder: Gets the traceback of each failed trial, "CELL point-N.txt", and loses it when the trial succeeds.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._told, self._failed = 0, set[tuple[Cell, str]]()

    def on_result_stored(self, result: TrialResult) -> None:
        """Takes a result. Raises AllFail if it is one more failure and there was nothing else so far."""
        trial, self._told = result.trial, self._told + 1
        path = self.folder / f"{trial.cell} {trial.file_name}.txt"
        if result.status is not Status.FAILED:
            self._failed.discard((trial.cell, trial.file_name))
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()
            return
        self._failed.add((trial.cell, trial.file_name))
        with suppress(StorageError), replacing(path) as temporary:  # the storage has it, and MLflow
            temporary.write_text(result.traceback or result.failure, encoding="utf-8")
        if self._told == len(self._failed) == FIRST:
            raise AllFail(
                f"the first {FIRST} trials failed, the last with {result.failure}; tracebacks in {self.folder}"
            )

    def summary(self) -> str:
        """What to tell of the trials that failed, in a sentence; nothing if none did."""
        match len(self._failed):
            case 0:
                return ""
            case 1:
                return f"1 trial failed, its traceback is in {self.folder}; the same command runs it again"
            case n:
                return f"{n} trials failed, their tracebacks are in {self.folder}; the same command runs them again"
