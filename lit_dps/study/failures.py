"""Collects the failed trials of a study: writes a file for each, and summarizes them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lit_dps.core.atomic_write import replacing
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.trial import Cell, Status, TrialResult

FIRST = 3  # a study ends if its first 3 trials all fail
# Trials that always fail in the same place, at least twice, will probably fail again.
EQUAL_FAILURES = 2
# Errors of disks, networks, memory and other processes may disappear without a change.
_PASSING = re.compile(
    r"(OS|IO|File\w+|Permission|Memory|OutOfMemory|Connection\w*|Timeout|BrokenPipe|URL|HTTP)Error"
)
_FRAME = re.compile(r' *File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
# Kinds of trials, from all trials to a single one. Each function returns the name of a trial's
# kind.
_KINDS: tuple[Callable[[Cell, str], str], ...] = (
    lambda cell, file_name: "this study",
    lambda cell, file_name: str(cell.series),
    lambda cell, file_name: f"B={cell.batch_size}",
    lambda cell, file_name: str(cell),
    lambda cell, file_name: f"{cell} {file_name}",
)


class AllFail(UserError):
    """All of the first trials of a run of a study failed; the value is the last failure."""


@dataclass(frozen=True)
class Failure:
    """The type of an error and the place that raised it."""

    error: str
    place: str

    def __str__(self) -> str:
        return f"{self.error} in {self.place}"


def failure_in(traceback: str) -> Failure | None:
    """Return the error's type and the last place of a traceback.

    Returns:
        None if the text has no frame, or if the error may disappear without a change.
    """
    lines = traceback.splitlines()
    frame = None
    number = 0
    for i, line in enumerate(lines):
        match = _FRAME.match(line)
        if match:
            frame, number = match, i
    if frame is None:
        return None
    for line in lines[number + 1 :]:
        if line and not line.startswith(" "):
            error = line.partition(":")[0].rpartition(".")[2]
            if _PASSING.fullmatch(error):
                return None
            name = Path(frame["file"]).name
            return Failure(error, f"{name}, line {frame['line']}, in {frame['name']}")
    return None


class Failures:
    """Collects the failures of one run of a study.

    Args:
        folder: The folder of tracebacks. A file "CELL point-N.txt" is written when a trial fails,
            and deleted when it succeeds.
        earlier: The results of earlier runs of the study.
    """

    def __init__(self, folder: Path, earlier: Iterable[TrialResult] = ()):
        self.folder = folder
        self._count = 0  # results of this run
        self._failed: set[tuple[Cell, str]] = set()
        self._last = ""  # message of the last failure
        # The attempts at each trial. None is an attempt that did not fail, or whose error may
        # disappear.
        self._attempts: dict[tuple[Cell, str], list[Failure | None]] = defaultdict(list)
        for result in earlier:
            self._note(result)

    def _note(self, result: TrialResult) -> None:
        failure = None
        if result.status is Status.FAILED:
            failure = failure_in(result.traceback)
        self._attempts[result.trial.cell, result.trial.file_name].append(failure)

    def add(self, result: TrialResult) -> None:
        """Add a result. Raise AllFail if the first `FIRST` results are all failures."""
        trial = result.trial
        self._count += 1
        self._note(result)
        path = self.folder / f"{trial.cell.stored_name} {trial.file_name}.txt"
        if result.status is not Status.FAILED:
            self._failed.discard((trial.cell, trial.file_name))
            with suppress(OSError):
                path.unlink(missing_ok=True)
                self.folder.rmdir()
                self.folder.parent.rmdir()
            return
        self._failed.add((trial.cell, trial.file_name))
        # The storage and MLflow have the traceback, too.
        with suppress(StorageError), replacing(path) as temporary:
            temporary.write_text(result.traceback or result.failure, encoding="utf-8")
        self._last = result.failure
        if self._count == FIRST:
            self.refuse_if_all_failed()

    def refuse_if_all_failed(self) -> None:
        """Raise AllFail if this run had results, and all are failures."""
        if not self._count or self._count > len(self._failed):
            return
        raise AllFail(
            f"the first {self._count} trials failed, the last with {self._last}. "
            f"Tracebacks are in {self.folder}{self._advice()}",
            value=self._last,
        )

    def lasting(self) -> dict[str, Failure]:
        """Return the kinds of trials that always fail in the same place, with their failure.

        All attempts at trials of a kind failed with the same type of error in the same place, and
        there were at least `EQUAL_FAILURES` attempts. A kind is omitted if a larger kind contains
        it.
        """
        kinds: dict[str, Failure] = {}
        covered: set[tuple[Cell, str]] = set()
        for kind_of in _KINDS:
            members = defaultdict(list)
            for trial in self._attempts:
                members[kind_of(*trial)].append(trial)
            for kind, trials in members.items():
                attempts = []
                for trial in trials:
                    attempts += self._attempts[trial]
                failure = attempts[0]
                if failure is None or len(set(attempts)) > 1 or len(attempts) < EQUAL_FAILURES:
                    continue
                if not covered.issuperset(trials):
                    kinds[kind] = failure
                    covered.update(trials)
        return kinds

    def summary(self) -> str:
        """Return a sentence on the trials that failed; "" if none did."""
        count = len(self._failed)
        if not count:
            return ""
        where = f"{count} trials failed, their tracebacks are in {self.folder}"
        again = "the same command runs them again"
        if count == 1:
            where = f"1 trial failed, its traceback is in {self.folder}"
            again = "the same command runs it again"
        return f"{where}; {again}{self._advice()}"

    def _advice(self) -> str:
        """Return a sentence on failures that need a change; "" if another attempt may succeed."""
        lines = []
        for kind, failure in self.lasting().items():
            lines.append(f"all trials of {kind} failed with {failure}")
        if not lines:
            return ""
        shown = "; ".join(lines)
        return f". It would fail again: {shown}. Change the code or the configuration first"
