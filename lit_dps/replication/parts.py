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
    """A figure: what it shows, its path from the page's folder, and the name of its kind."""

    caption: str
    path: str
    name: str = ""


class Core(NamedTuple):
    """What the configuration of a study asks for. The study may have been extended since."""

    batch_sizes: Sequence[int]
    trials: int
    sparsities: Sequence[float]

    def has(self, result: TrialResult) -> bool:
        """Return True if the configuration asks for a trial, or for the point of a repeat."""
        cell = result.trial.cell
        if cell.batch_size not in self.batch_sizes or cell.sparsity not in self.sparsities:
            return False
        return result.trial.point < self.trials


class Machine(NamedTuple):
    """What the pages were made on."""

    cores: int
    cpu: str
    torch: str


class Scale(NamedTuple):
    """How large a study is; scales compare in this order."""

    at_papers_goal: bool = False  # it met the paper's goal, or a harder one
    is_whole: bool = False
    trials: int = 0


class Width(NamedTuple):
    """How much of a figure a study fills; widths compare in this order.

    Cells come before trials, which make a curve no longer.
    """

    at_papers_goal: bool
    cells: int
    trials: int


@dataclass(frozen=True)
class Part:
    """A study on the pages, finished or not.

    Attributes:
        study: The study, without cells that are incomplete (`complete_subset`).
        command: What makes it, in a shell.
        images: Its figures.
        core: What its configuration asks for; None if that is the entire study.
        incomplete: The incomplete cells, in words; empty without any.
    """

    study: Analysis
    command: str
    images: Sequence[Image] = ()
    core: Core | None = None
    incomplete: str = ""

    @property
    def name(self) -> str:
        """The name of the study."""
        return self.study.record.name

    @property
    def is_whole(self) -> bool:
        """True if all cells are measured that the configuration asks for, if not more."""
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
        """Hours of its trials and repeats, one after another.

        Without stacked ones: each of these has the time of all that were trained with it.
        """
        return _hours(self.runs)

    @property
    def core_hours(self) -> float:
        """Like `hours`, of the trials and repeats that its configuration asks for."""
        if self.core is None:
            return self.hours
        return _hours(filter(self.core.has, self.runs))

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
    def scale(self) -> Scale:
        """How large the study is."""
        return Scale(self._is_at_papers_goal(), self.is_whole, self.finished)

    @property
    def width(self) -> Width:
        """How much of a figure the study fills."""
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


def _hours(runs: Iterable[TrialResult]) -> float:
    """Return the hours of some runs one after another, without stacked ones."""
    seconds = 0.0
    for run in runs:
        if not run.is_stacked:
            seconds += run.seconds
    return seconds / 3600


def judge_parts(parts: Sequence[Part]) -> list[Judgement]:
    """Return the judgements of all claims on all studies of the pages."""
    studies = []
    commands = {}
    for part in parts:
        studies.append(part.study)
        commands[part.name] = part.command
    return judge_claims(studies, commands)


def scale_of(judgement: Judgement, parts: Sequence[Part]) -> Scale:
    """Return the scale of a judgement's study, of the smaller one of a pair; least without any."""
    scales = []
    for part in parts:
        if part.name in judgement.studies:
            scales.append(part.scale)
    return min(scales, default=Scale())


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows, at least one and all with the same columns, as a table."""
    heads = list(rows[0])
    lines = [_table_line(heads), _table_line(["---"] * len(heads))]
    lines += [_table_line(row.values()) for row in rows]
    return "\n".join(lines) + "\n"


def _table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """Return a text in which * and | have no meaning to Markdown; code stays code."""
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
