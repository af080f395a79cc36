"""What a torture came to, and the page that tells it."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from tests.e2e.commands import FAST

CELLS = 4
TEXT = """# Nothing is lost

{date}, {cores} cores, {system}, torch {torch}, optuna {optuna}:

```bash
python -m tests.torture {arguments}
```

| storage | kills | of these | trials cut short | lost | doubled | missing | identical tables | unexpected ends |
|---|---|---|---|---|---|---|---|---|
{rows}

`study` commands share a small study, in turn one of two workers and one of two ranks that train each trial together.
While they train one of these processes, or a command with all of them, is killed, told to leave, or stopped for a
while; whatever ended is started again. At the end of each study every result that was ever seen in the database must
still be there as it was, every declared point must be there once, and the table must be the one of a study that was
never disturbed. `make torture` does it again.

Other faults, each with a test of the default suite. A database that is gone or damaged loses the trials that no copy
has, and the line says so; nothing else here loses, changes or doubles a result.

| what happens | what the next command does | test |
|---|---|---|
{faults}
"""
# What happens, what the next command does, and the files of its tests
FAULTS = (
    ("a worker is killed, then the host name differs or the clock is a day behind", "runs its trial", "liveness"),
    ("a worker is suspended", "leaves its trial, names the process, exit code 4", "liveness"),
    ("the folder is copied while workers run", "runs their trials in the copy; the original is unharmed", "liveness"),
    ("a connection to PostgreSQL is cut", "one line, exit code 2; the trial runs again", "store_shared"),
    ("the clock is set back after trials failed", "runs them again", "failures"),
    ("the database is deleted, or cut to 0 bytes", "names cause and remedy, begins nothing new", "lost"),
    ("the database is cut in half, or overwritten", "names cause and remedy, writes nothing", "lost"),
    ("Ctrl-C comes again while the first one is counted", "one line, exit code 130", "interrupt"),
    ("somebody else's Optuna study has the name", "one line, nothing is written", "foreign_studies"),
)


@dataclass
class Report:
    """What happened; results are told apart by cell, point and all that is stored of them."""

    storage: str
    commands: int
    trials: int
    kills: Counter = field(default_factory=Counter)
    studies: int = 0
    identical: int = 0
    cut_short: int = 0
    lost: int = 0
    doubled: int = 0
    missing: int = 0
    unexpected: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def study(self) -> tuple:
        """The command line."""
        # of trials that take a second: one that is over at once cannot be cut short
        return "study", "--config", FAST, "--study.trials", self.trials, "--goal.max_steps", 1200

    @property
    def points(self) -> int:
        return CELLS * self.trials

    @property
    def good(self) -> bool:
        return self.identical == self.studies > 0 == self.lost + self.doubled + self.missing + len(self.unexpected)

    @property
    def share(self) -> float:
        """Trials cut short by a kill."""
        return self.cut_short / max(1, self.kills.total())

    def line(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kills.items()))
        tables = f"{self.identical} of {self.studies} tables identical to the unbroken one"
        found = f"{self.lost} results lost, {self.doubled} doubled, {self.missing} missing; {tables}"
        others = "; ".join([f"{len(self.unexpected)} unexpected ends", *self.unexpected])
        return (
            f"{self.storage}: {self.kills.total()} kills ({kinds}) of {self.commands} commands with 2 workers or ranks "
            f"each, {self.cut_short} trials cut short ({self.share:.0%} of the kills): {found}; {others}; "
            f"{self.seconds / 60:.0f} minutes"
        )


def page(reports: Sequence[Report], arguments: Sequence[str]) -> str:
    """The page as Markdown."""
    rows = [
        f"| {r.storage} | {r.kills.total()} | {', '.join(f'{n} {kind}' for kind, n in sorted(r.kills.items()))} | "
        f"{r.cut_short} | {r.lost} | {r.doubled} | {r.missing} | {r.identical} of {r.studies} | {len(r.unexpected)} |"
        for r in reports
    ]
    return TEXT.format(
        date=datetime.date.today().isoformat(),
        cores=len(os.sched_getaffinity(0)),
        system=platform.system(),
        torch=version("torch"),
        optuna=version("optuna"),
        arguments=shlex.join(arguments),
        rows="\n".join(rows),
        faults="\n".join(f"| {what} | {then} | `tests/unit/test_{file}.py` |" for what, then, file in FAULTS),
    )
