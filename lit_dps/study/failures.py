"""The trials of a study that failed: a file for each, and what the user reads of them at the end."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lit_dps.errors import StorageError, UserError
from lit_dps.files import replacing
from lit_dps.trial import Cell, Status, TrialResult

FIRST = 3  # results of which one at least has to be none of a failed trial
FAILED = 1  # exit code of a study with failed trials
# A failure that comes twice in the same place, and never does not come, has a cause that stays.
EQUAL_FAILURES = 2
# Errors of disks, networks, memory and other processes: they may go away without a change.
_PASSING = re.compile(r"(OS|IO|File\w+|Permission|Memory|OutOfMemory|Connection\w*|Timeout|BrokenPipe|URL|HTTP)Error")
_FRAME = re.compile(r' *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
# What trials may have in common, from all of them to a single one: the name of the kind that a trial belongs to.
_KINDS: tuple[Callable[[Cell, str], str], ...] = (
    lambda cell, file_name: "this study",
    lambda cell, file_name: str(cell.series),
    lambda cell, file_name: f"B={cell.batch_size}",
    lambda cell, file_name: str(cell),
    lambda cell, file_name: f"{cell} {file_name}",
)


class AllFail(UserError):
    """The first trials of a run of a study failed, every one."""


@dataclass(frozen=True)
class Failure:
    """The type of an error and the place that raised it."""

    error: str
    place: str

    def __str__(self) -> str:
        return f"{self.error} in {self.place}"


def failure_in(traceback: str) -> Failure | None:
    """Return the error's type and the last place of a traceback; None if the text has none, or the error may pass."""
    lines = traceback.splitlines()
    frames = [(i, match) for i, line in enumerate(lines) if (match := _FRAME.match(line))]
    if not frames:
        return None
    last, frame = frames[-1]
    for line in lines[last + 1 :]:
        if line and not line.startswith(" "):
            error = line.partition(":")[0].rpartition(".")[2]
            if _PASSING.fullmatch(error):
                return None
            name = Path(frame["file"]).name
            return Failure(error, f"{name}, line {frame['line']}, in {frame['name']}")
    return None


class Failures:
    """Takes all results of one run of a study.

    Args:
        folder: Gets the traceback of each failed trial, "CELL point-N.txt", and loses it when the trial succeeds.
        earlier: The results of earlier runs of the study.
    """

    def __init__(self, folder: Path, earlier: Iterable[TrialResult] = ()):
        self.folder = folder
        self._count, self._failed = 0, set[tuple[Cell, str]]()
        self._last = ""  # how the last one failed
        # the attempts at each trial: how they failed; None of one that did not fail, or whose error may pass
        self._attempts: dict[tuple[Cell, str], list[Failure | None]] = defaultdict(list)
        for result in earlier:
            self._note(result)

    def _note(self, result: TrialResult) -> None:
        failure = None
        if result.status is Status.FAILED:
            failure = failure_in(result.traceback)
        self._attempts[result.trial.cell, result.trial.file_name].append(failure)

    def on_result_stored(self, result: TrialResult) -> None:
        """Takes a result. Raises AllFail if it is one more failure and there was nothing else so far."""
        trial = result.trial
        self._count += 1
        self._note(result)
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
        self._last = result.failure
        if self._count == FIRST:
            self.refuse_if_all_failed()

    def refuse_if_all_failed(self) -> None:
        """Raise AllFail if this run had results, and all are failures."""
        if not self._count or self._count > len(self._failed):
            return
        raise AllFail(
            f"the first {self._count} trials failed, the last with {self._last}; tracebacks in "
            f"{self.folder}{self._advice()}"
        )

    def lasting(self) -> dict[str, Failure]:
        """Return the kinds of trials that fail in the same place whenever they run, and how they fail.

        All trials of a kind have failed, at least `EQUAL_FAILURES` times together, and always with the same type of
        error in the same place. A kind that is part of another one is left out.
        """
        kinds: dict[str, Failure] = {}
        covered: set[tuple[Cell, str]] = set()
        for kind_of in _KINDS:
            members = defaultdict(list)
            for trial in self._attempts:
                members[kind_of(*trial)].append(trial)
            for kind, trials in members.items():
                attempts = [failure for trial in trials for failure in self._attempts[trial]]
                same = len(set(attempts)) == 1 and attempts[0] is not None
                if same and len(attempts) >= EQUAL_FAILURES and not covered.issuperset(trials):
                    kinds[kind] = attempts[0]
                    covered.update(trials)
        return kinds

    def summary(self) -> str:
        """Return a sentence on the trials that failed; "" if none did."""
        count = len(self._failed)
        if not count:
            return ""
        if count == 1:
            text = f"1 trial failed, its traceback is in {self.folder}; the same command runs it again"
        else:
            text = f"{count} trials failed, their tracebacks are in {self.folder}; the same command runs them again"
        return text + self._advice()

    def _advice(self) -> str:
        """Return what to change before the command is given again; "" if another attempt may do without."""
        lasting = self.lasting()
        if not lasting:
            return ""
        shown = "; ".join(f"all trials of {kind} failed with {failure}" for kind, failure in lasting.items())
        return f". It would fail again: {shown}. Change the code or the configuration first"
