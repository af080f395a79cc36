"""A study on the pages, its figures, and how large its scale is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from lit_dps import Status, TrialResult
from lit_dps.analysis import Analysis
from lit_dps.core.paper_protocol import protocol_of
from lit_dps.replication.claims import Judgement, judge_claims


class Image(NamedTuple):
    """A figure: what it shows, its path from the page's folder, the name of its kind, its studies.

    `studies` are the names of the compared studies; empty for a figure of one study.
    """

    caption: str
    path: str
    name: str = ""
    studies: tuple[str, ...] = ()


class Core(NamedTuple):
    """The grid that the configuration of a study declares. Commands may have extended the study."""

    batch_sizes: Sequence[int]
    trials: int
    sparsities: Sequence[float]

    def has(self, result: TrialResult) -> bool:
        """Return True if the configuration declares a trial, or the point of a repeat."""
        cell = result.trial.cell
        if cell.batch_size not in self.batch_sizes or cell.sparsity not in self.sparsities:
            return False
        return result.trial.point < self.trials


class Machine(NamedTuple):
    """The machine that made the pages."""

    cores: int
    cpu: str
    torch: str


class StudySize(NamedTuple):
    """The size of a study. The fields are compared in this order."""

    at_papers_goal: bool = False  # it met the paper's goal, or a harder one
    is_whole: bool = False
    trials: int = 0


class Width(NamedTuple):
    """The extent of a study in a figure. The fields are compared in this order.

    Cells come before trials, because more trials do not make a curve longer.
    """

    at_papers_goal: bool
    cells: int
    trials: int


@dataclass(frozen=True)
class Part:
    """A study on the pages, finished or not.

    Attributes:
        study: The study, without cells that are incomplete (`complete_subset`).
        command: The shell command that makes it.
        images: Its figures.
        core: The grid that its configuration declares; None if this is the entire study.
        incomplete: The incomplete cells as text; empty without any.
        is_subset: True for the `sparse_subset` of the study of another part.
    """

    study: Analysis
    command: str
    images: Sequence[Image] = ()
    core: Core | None = None
    incomplete: str = ""
    is_subset: bool = False

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.study.record.name

    @property
    def is_whole(self) -> bool:
        """True if all cells that the configuration declares are measured."""
        if not self.incomplete:
            return True
        if self.core is None:
            return False
        record = self.study.record
        has_batch_sizes = set(self.core.batch_sizes) <= set(record.batch_sizes)
        return has_batch_sizes and set(self.core.sparsities) <= set(record.sparsities)

    @property
    def trials(self) -> list[TrialResult]:
        """Its finished trials."""
        return list(chain.from_iterable(self.study.record.results.values()))

    @property
    def repeats(self) -> list[TrialResult]:
        """Its finished repeats of best points."""
        return list(chain.from_iterable(self.study.record.repeats.values()))

    @property
    def hours(self) -> float:
        """Hours of its trials and repeats, one after another, without stacked trials.

        The time of a stacked trial is the time of its whole stack.
        """
        return hours_of(self.runs)

    @property
    def core_hours(self) -> float:
        """Hours of the trials and repeats that its configuration declares; see `hours`."""
        return hours_of(self.core_runs)

    @property
    def core_runs(self) -> list[TrialResult]:
        """Its finished trials and repeats that its configuration declares."""
        if self.core is None:
            return self.runs
        return list(filter(self.core.has, self.runs))

    @property
    def runs(self) -> list[TrialResult]:
        """Its finished trials and repeats."""
        return self.trials + self.repeats

    @property
    def stacked(self) -> int:
        """The number of its trials and repeats that were trained stacked."""
        return sum(run.is_stacked for run in self.runs)

    @property
    def finished(self) -> int:
        """The number of its trials that have finished."""
        return self.declared - sum(cell.pending for cell in self.study.cells)

    @property
    def declared(self) -> int:
        """The number of its trials, finished or not."""
        return self.study.record.trials * len(self.study.cells)

    @property
    def scale(self) -> StudySize:
        """The size of the study."""
        return StudySize(self._is_at_papers_goal(), self.is_whole, self.finished)

    @property
    def width(self) -> Width:
        """The extent of the study in a figure."""
        cells = len(self.study.record.results)
        return Width(self._is_at_papers_goal(), cells, self.finished)

    def _is_at_papers_goal(self) -> bool:
        """Return True if a trial met the goal of the paper's workload, or a harder one."""
        record = self.study.record
        paper = protocol_of(record.config)
        if paper is None or not record.goal.is_validation_error:
            return False
        if record.goal.with_value(paper.error).is_easier(record.goal.value):
            return False
        return any(result.status is Status.COMPLETE for result in self.trials)


def hours_of(runs: Iterable[TrialResult]) -> float:
    """Return the hours of some runs one after another, without stacked runs."""
    seconds = 0.0
    for run in runs:
        if not run.is_stacked:
            seconds += run.seconds
    return seconds / 3600


def run_key(run: TrialResult) -> tuple[str, float]:
    """Return what identifies a run on the pages, because two parts may share a run.

    Two runs of one trial are the same if they took the same seconds.
    """
    return str(run.trial), run.seconds


def judge_parts(parts: Sequence[Part]) -> list[Judgement]:
    """Return the judgements of all claims on all studies of the pages."""
    studies = []
    commands = {}
    for part in parts:
        studies.append(part.study)
        commands[part.name] = part.command
    return judge_claims(studies, commands)


def scale_of(judgement: Judgement, parts: Sequence[Part]) -> StudySize:
    """Return the scale of a judgement's study, or of the smaller study of a pair."""
    scales = []
    for part in parts:
        if part.name in judgement.studies:
            scales.append(part.scale)
    return min(scales, default=StudySize())


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a Markdown table; at least one row, and all rows with the same columns."""
    heads = list(rows[0])
    lines = [_table_line(heads), _table_line(["---"] * len(heads))]
    lines += [_table_line(row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """Return a text with * and | escaped for Markdown; code is unchanged."""
    if text.startswith("`"):
        return text
    return text.replace("|", "\\|").replace("*", "\\*")


def code_block(text: str) -> str:
    """Return a text as a block of code."""
    return f"```\n{text.rstrip()}\n```\n"


def figures(images: Sequence[Image]) -> str:
    """Return images, each with its caption below."""
    blocks = []
    for image in images:
        blocks.append(f"![{image.caption}]({image.path})\n\n*{escaped(image.caption)}*\n")
    return "\n".join(blocks)
