"""The results of a torture run, and the page that reports them."""

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
from tests.torture_faults import Fault

CELLS = 4
KILLS = "## Processes that are killed at random"
KILLS_TEXT = """
{about}

Several `study` commands share a study. They alternate: one has two workers, the next has two ranks that
train each trial together. While they train, a process, or a command with all its processes, is killed,
terminated or suspended for a while. Commands that ended are started again.

| fault | how often | lost | changed | doubled | message and exit code |
|---|---|---|---|---|---|
{rows}
"""
FAULTS = "## Faults of other kinds"
FAULTS_TEXT = """
{about}

Each fault has a small study. The last column shows the message of the next command, without its remedy.
Results are lost only in the row where a restored copy lacks the last results; the study trains them
again. In the row with SIGSTOP, the suspended process holds no lock.

| fault | how often | lost | changed | doubled | message and exit code |
|---|---|---|---|---|---|
{rows}
"""


@dataclass
class Report:
    """Counts of a torture run. Results are compared by cell, point and all stored values.

    Attributes:
        changed: Results that differ from an unbroken study on as many ranks, apart from times.
        on_ranks: Results of trials that two ranks trained together.
    """

    storage: str
    commands: int
    trials: int
    kills: Counter = field(default_factory=Counter)
    studies: int = 0
    changed: int = 0
    on_ranks: int = 0
    cut_short: int = 0
    lost: int = 0
    doubled: int = 0
    missing: int = 0
    unexpected: list[str] = field(default_factory=list)
    seconds: float = 0.0
    options: tuple = ()

    @property
    def study(self) -> tuple:
        """The command line."""
        # of trials that take a second: one that is over at once cannot be cut short
        study = "study", "--config", FAST, "--study.trials", self.trials, "--goal.max_steps", 1200
        return (*study, *self.options)

    @property
    def points(self) -> int:
        return CELLS * self.trials

    @property
    def good(self) -> bool:
        faults = self.lost + self.changed + self.doubled + self.missing + len(self.unexpected)
        return self.studies > 0 and faults == 0

    @property
    def share(self) -> float:
        """Trials cut short by a kill."""
        return self.cut_short / max(1, self.kills.total())

    def line(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kills.items()))
        total = self.studies * self.points
        found = (
            f"{self.changed} of {total} results changed ({self.on_ranks} are from two ranks), "
            f"{self.lost} lost, {self.doubled} doubled, {self.missing} missing"
        )
        others = "; ".join([f"{len(self.unexpected)} unexpected ends", *self.unexpected])
        return (
            f"{self.storage}: {self.kills.total()} kills ({kinds}) of {self.commands} commands "
            "with 2 workers or ranks "
            f"each, {self.cut_short} trials cut short ({self.share:.0%} of the kills): {found}; "
            f"{others}; "
            f"{self.seconds / 60:.0f} minutes"
        )


def page(
    reports: Sequence[Report], faults: Sequence[Fault], arguments: Sequence[str], known: str = ""
) -> str:
    """Return the page as Markdown: the known page with the sections that were run.

    Args:
        reports: Of killed processes, by storage.
        faults: Of other kinds.
        arguments: Of the command.
        known: The page so far. Its other text stays.
    """
    about = about_run(arguments)
    for heading, template, rows in (
        (KILLS, KILLS_TEXT, [row_of_report(report) for report in reports]),
        (FAULTS, FAULTS_TEXT, [row_of_fault(fault) for fault in faults]),
    ):
        if rows:
            text = f"{heading}\n" + template.format(about=about, rows="\n".join(rows))
        else:
            text = section_of(known, heading)
        known = with_section(known, heading, text)
    return known


def with_section(page: str, heading: str, text: str) -> str:
    """Return the page with this text as the section of this heading, appended if it is missing."""
    before, heading_found, rest = page.partition(f"{heading}\n")
    if not heading_found:
        return f"{page}{text}\n"
    _, next_heading, after = rest.partition("\n## ")
    return f"{before}{text}{next_heading}{after}"


def about_run(arguments: Sequence[str]) -> str:
    """Return when, where and by which command a section was made."""
    day, cores = datetime.date.today().isoformat(), len(os.sched_getaffinity(0))
    versions = f"torch {version('torch')}, optuna {version('optuna')}"
    command = shlex.join(["python", "-m", "tests.torture", *arguments])
    return f"{day}, {cores} cores, {platform.system()}, {versions}: `{command}`"


def section_of(text: str, heading: str) -> str:
    """Return a section of a page, with its heading; a line that says so if it is not there."""
    _, found, rest = text.partition(f"{heading}\n")
    if not found:
        return f"{heading}\n\nNot run yet.\n"
    content = rest.partition("\n## ")[0].rstrip()
    return f"{heading}\n{content}\n"


def row_of_report(report: Report) -> str:
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(report.kills.items()))
    cells = [
        f"{report.storage}: {kinds}",
        f"{report.kills.total()} kills; {report.cut_short} trials cut short",
        str(report.lost + report.missing),
        f"{report.changed} of {report.studies * report.points}",
        str(report.doubled),
        f"no traceback; exit codes 0, 2, 4 and 130; {len(report.unexpected)} commands ended "
        "otherwise",
    ]
    return f"| {' | '.join(cells)} |"


def row_of_fault(fault: Fault) -> str:
    numbers = [fault.tried, fault.lost, fault.changed, fault.doubled]
    said = "; or ".join(fault.said + [f"unexpected: {each}" for each in fault.unexpected])
    return f"| {fault.what} | {' | '.join(map(str, numbers))} | {said} |"
