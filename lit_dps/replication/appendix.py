"""The appendix of the replication's page: every study, every verdict, how they were made. From
studies alone.

The same studies give the same pages but for their date, command and the machine that they were made
on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.record import setting
from lit_dps.core.trial import STACKED, TrialResult
from lit_dps.replication.paper import Judgement, judge, overall, protocol_rows, search_text
from lit_dps.replication.rules import Verdict
from lit_dps.report.answer import timing_notes
from lit_dps.report.text import table_and_law, theory_text
from lit_dps.report.warnings import study_notes

_THEORY = """\
K\\* = c1/B + c2 with c1 proportional to Delta x beta x L at equal epsilon: the loss to go, the variance of the gradient
at initialization, and the mean local Lipschitz constant along the run. The paper's ratios for 90 % sparse over dense
Simple-CNN on MNIST are 1.00 x 0.54 x 3.09 = 1.67. `lit_dps/analysis/theory.py` has the derivation."""


class Image(NamedTuple):
    """A figure of the page: what it shows, its path from the page's folder, and the name of its
    kind."""

    caption: str
    path: str
    name: str = ""


class Core(NamedTuple):
    """Batch sizes of a study, trials of each cell, and sparsities."""

    batch_sizes: Sequence[int]
    trials: int
    sparsities: Sequence[float]

    def has(self, result: TrialResult) -> bool:
        cell = result.trial.cell
        asked = cell.batch_size in self.batch_sizes and cell.sparsity in self.sparsities
        return asked and result.trial.point < self.trials


@dataclass(frozen=True)
class Part:
    """A study on the page, finished or not."""

    study: Analysis
    command: str  # what makes it, in a shell
    images: Sequence[Image] = ()
    core: Core | None = None  # what its configuration asks for; the study may have been extended
    left: str = ""  # what is under way (`complete_subset`) and not in `study`

    @property
    def whole(self) -> bool:
        """Whether every cell that its configuration asks for is measured; cells beyond these may be
        under way."""
        if not self.left or self.core is None:
            return not self.left
        record = self.study.record
        return {*self.core.batch_sizes} <= {*record.batch_sizes} and {*self.core.sparsities} <= {
            *record.sparsities
        }

    def runs(self, kind: str) -> list[TrialResult]:
        """Its finished trials ("results"), or repeats of best points ("repeats")."""
        return [result for cell in getattr(self.study.record, kind).values() for result in cell]

    def hours(self, core: bool = False) -> float:
        """Hours of its trials and repeats, or of those that its configuration asks for, one after
        another.

        Without those in lockstep (`stacked`): each has the time of all that were beside it.
        """
        runs = [r for r in self._every if not core or self.core is None or self.core.has(r)]
        return sum(r.seconds for r in runs if not r.flags.get(STACKED)) / 3600

    @property
    def stacked(self) -> int:
        """Its trials and repeats that were trained in lockstep."""
        return sum(bool(run.flags.get(STACKED)) for run in self._every)

    @property
    def _every(self) -> list[TrialResult]:
        return [*self.runs("results"), *self.runs("repeats")]


class Machine(NamedTuple):
    """What the page was made on: CPU cores, model of the CPU, version of torch."""

    cores: int
    cpu: str
    torch: str


def appendix_page(
    parts: Sequence[Part],
    comparisons: Mapping[str, Sequence[Image]],
    machine: Machine,
    command: str,
    date: str,
) -> str:
    """All that the page leaves out, of at least one study; `comparisons` as on the page."""
    judgements = judge_parts(parts)
    sections = [
        "# Replication: all studies, all verdicts\n",
        "What [the page of the replication](replication.md) rests on, computed from the stored "
        "trials.\n",
        _made(parts, machine, command, date),
        _claims(judgements),
        *(f"## {name}\n\n{_images(images)}" for name, images in comparisons.items() if images),
        *(_part(part) for part in parts),
        _theory(parts),
    ]
    return "\n".join(sections)


def judge_parts(parts: Sequence[Part]) -> list[Judgement]:
    """All claims on all studies of the page."""
    return judge(
        [part.study for part in parts], {part.study.record.name: part.command for part in parts}
    )


def progress(study: Analysis) -> tuple[int, int]:
    """How many of a study's trials have finished, and how many it has."""
    declared = study.record.trials * len(study.cells)
    return declared - sum(cell.pending for cell in study.cells), declared


def _made(parts: Sequence[Part], machine: Machine, command: str, date: str) -> str:
    rows, core, elapsed = [], 0.0, 0.0
    for part in parts:
        record = part.study.record
        workers = setting(record.config, "study.workers") or machine.cores
        asked, hours = part.hours(core=True) / workers, part.hours() / workers
        core, elapsed = core + asked, elapsed + hours
        rows.append(
            {
                "study": f"`{record.name}`",
                "workload": record.workload,
                "trials": "{} of {}".format(*progress(part.study)),
                "at a time": str(workers),
                "hours as configured": f"{asked:.2f}",
                "hours in all": f"{hours:.2f}",
                "command": f"`{part.command}`",
            }
        )
    made = (
        f"This page was made {date} on {machine.cores} cores of {machine.cpu}, with torch "
        f"{machine.torch}."
    )
    took = (
        "Hours are those of the trials and repeats, on whatever machine ran them, shared by the "
        "workers. What is "
        f"shown took {core:.2f} hours as configured and {elapsed:.2f} hours as the commands "
        "extend it. Attempts that "
        "a later one of the same trial went beyond do not count; trials that a study has from "
        "another count twice."
    )
    if stacked := {part.study.record.name: part.stacked for part in parts if part.stacked}:
        told = ", ".join(f"{count} of `{name}`" for name, count in stacked.items())
        took += f" Trials in lockstep share their time and have no hours here: {told}."
    return f"## How it was made\n\n`{command}`\n\n{made} {took}\n\n{table(rows)}"


def _claims(judgements: Sequence[Judgement]) -> str:
    short, rows = [], []
    for claim, verdicts in overall(judgements).items():
        row = {"claim": f"{claim.text} (Section {claim.source})"}
        short.append(
            row
            | {
                verdict: ", ".join(verdicts.get(verdict, ["-"])) or "no study"
                for verdict in Verdict
            }
        )
    for judgement in judgements:
        row = {
            "claim": judgement.claim.text,
            "study": judgement.where or "-",
            "paper": judgement.claim.paper,
        }
        row |= {"measured": judgement.measured, "verdict": judgement.verdict}
        rows.append(row | {"command": f"`{judgement.command}`" if judgement.command else "-"})
    return f"## The paper's claims, on every study\n\n{table(short)}\n{table(rows)}"


def _part(part: Part) -> str:
    record, (done, declared) = part.study.record, progress(part.study)
    lines = [
        f"## Study {record.name}\n",
        f"Workload {record.workload}, made by `{part.command}`.\n",
    ]
    if done < declared:
        lines.append(
            f"**{done} of {declared} trials have finished**; all of this page is about those.\n"
        )
    lines += [f"Searched: {search_text(record)}.\n", table(protocol_rows(record))]
    notes = [
        *study_notes(part.study),
        *timing_notes(record, part.study.answer),
    ]  # its figures have times
    lines.append(
        _block("\n".join([table_and_law(part.study), *(f"note: {line}" for line in notes)]))
    )
    return "\n".join([*lines, *([_images(part.images)] if part.images else [])])


def _theory(parts: Sequence[Part]) -> str:
    lines = ["## Theory\n", f"{_THEORY}\n"]
    for part in parts:
        name, text = part.study.record.name, theory_text(part.study)
        lines.append(
            f"`{name}`:\n\n{_block(text)}" if text else f"`{name}`: no terms were measured.\n"
        )
    return "\n".join(lines)


def _images(images: Sequence[Image]) -> str:
    return "\n".join(
        f"![{image.caption}]({image.path})\n\n*{escaped(image.caption)}*\n" for image in images
    )


def _block(text: str) -> str:
    return f"```\n{text.rstrip()}\n```\n"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows, all with the same columns, as a Markdown table; at least one."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines) + "\n"


def escaped(text: str) -> str:
    """Text in which K* and | mean nothing to Markdown; code stays code."""
    return text if text.startswith("`") else text.replace("|", "\\|").replace("*", "\\*")
