"""The appendix of the replication: every study, every verdict, and how they were made.

The same studies give the same pages, except for date, command and machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from lit_dps import Study, StudyRecord
from lit_dps.core.paper_protocol import BATCH_SIZES, SPARSITIES, TRIALS, protocol_of
from lit_dps.replication.claims import Judgement, studies_by_verdict
from lit_dps.replication.parts import (
    Image,
    Machine,
    Part,
    code_block,
    figures,
    hours_of,
    judge_parts,
    run_key,
    table,
)
from lit_dps.replication.rules import Verdict

_THEORY = """\
K\\* = c1/B + c2 with c1 proportional to Delta x beta x L at equal epsilon: the loss to go, the
variance of the gradient at initialization, and the mean local Lipschitz constant along the run. The
paper's ratios for 90 % sparse over dense Simple-CNN on MNIST are 1.00 x 0.54 x 3.09 = 1.67.
`lit_dps/analysis/theory.py` has the derivation."""
# Lists of numbers that double are abbreviated if they have at least this many.
_MIN_ABBREVIATED = 7


def appendix_page(
    parts: Sequence[Part],
    comparisons: Mapping[str, Sequence[Image]],
    machine: Machine,
    command: str,
    date: str,
) -> str:
    """Return the appendix, of at least one study.

    Args:
        parts: The studies.
        comparisons: Figures of several studies, by their `workload_and_goal`.
        machine: The machine that makes the page.
        command: The shell command that makes the page.
        date: The date of the page.
    """
    sections = [
        "# Replication: all studies, all verdicts\n",
        "The evidence of [the page of the replication](replication.md), computed from the stored "
        "trials.\n",
        _how_it_was_made(parts, machine, command, date),
        _claims_section(judge_parts(parts)),
    ]
    for name, images in comparisons.items():
        if images:
            sections.append(f"## {name}\n\n{figures(images)}")
    for part in parts:
        sections.append(_study_section(part))
    sections.append(_theory_section(parts))
    return "\n".join(sections)


def _how_it_was_made(parts: Sequence[Part], machine: Machine, command: str, date: str) -> str:
    rows = []
    stacked = []
    core_hours: dict[tuple[str, float], float] = {}
    hours: dict[tuple[str, float], float] = {}
    for part in parts:
        if part.stacked:
            stacked.append(f"{part.stacked} of `{part.name}`")
        record = part.study.record
        workers = _workers(record, machine)
        for run in part.core_runs:
            core_hours[run_key(run)] = hours_of([run]) / workers
        for run in part.runs:
            hours[run_key(run)] = hours_of([run]) / workers
        rows.append(
            {
                "study": f"`{record.name}`",
                "workload": record.workload,
                "trials": f"{part.finished} of {part.declared}",
                "at a time": str(workers),
                "hours as configured": f"{part.core_hours / workers:.2f}",
                "hours in all": f"{part.hours / workers:.2f}",
                "command": f"`{part.command}`",
            }
        )
    text = (
        f"This page was made {date} on {machine.cores} cores of {machine.cpu}, with torch "
        f"{machine.torch}. Hours are the time of the trials and repeats, on whatever machine "
        "ran them, divided by the number of workers. The studies took "
        f"{sum(core_hours.values()):.2f} hours as configured and {sum(hours.values()):.2f} hours "
        "as the commands extend them. Only the longest attempt of a trial counts. A trial of "
        "several rows counts once."
    )
    if stacked:
        text += f" Stacked trials share their time and have no hours here: {', '.join(stacked)}."
    return f"## How it was made\n\n`{command}`\n\n{text}\n\n{table(rows)}"


def _workers(record: StudyRecord, machine: Machine) -> int:
    """Return how many trials of a study ran at a time."""
    workers = record.setting("study.workers")
    if isinstance(workers, int) and workers:
        return workers
    return machine.cores


def _claims_section(judgements: Sequence[Judgement]) -> str:
    summary = []
    for claim, studies in studies_by_verdict(judgements).items():
        row = {"claim": f"{claim.claim} (Section {claim.section})"}
        for verdict in Verdict:
            names = studies.get(verdict, ["-"])
            row[verdict] = ", ".join(names) or "no study"
        summary.append(row)
    rows = []
    for judgement in judgements:
        rows.append(
            {
                "claim": judgement.claim.claim,
                "study": judgement.where or "-",
                "paper": judgement.claim.paper,
                "measured": judgement.measured,
                "verdict": str(judgement.verdict),
                "command": f"`{judgement.command}`" if judgement.command else "-",
            }
        )
    return f"## The paper's claims, on every study\n\n{table(summary)}\n{table(rows)}"


def _study_section(part: Part) -> str:
    record = part.study.record
    lines = [
        f"## Study {record.name}\n",
        f"Workload {record.workload}, made by `{part.command}`.\n",
    ]
    if part.finished < part.declared:
        finished = f"{part.finished} of {part.declared} trials have finished"
        lines.append(f"**{finished}.** Only these are analyzed.\n")
    lines += [f"Searched: {record.space_text}.\n", table(protocol_rows(record))]
    study = Study(record, part.study)
    notes = map("note: {}".format, study.notes)
    lines.append(code_block("\n".join([study.table_and_law, *notes])))
    if part.images:
        lines.append(figures(part.images))
    return "\n".join(lines)


def protocol_rows(record: StudyRecord) -> list[dict[str, str]]:
    """Return the protocols of a study and of the paper: columns "", this study, the paper."""
    goal = record.goal
    paper = protocol_of(record.config)
    of_paper = ("-", "-", "-")
    if paper is not None:
        of_paper = (f"{paper.error:g}", str(paper.check_interval), f"{paper.max_steps:,}")
    limit = "max_steps"
    if record.race_factor is not None:
        limit = f"{record.race_factor:g} K* of their cell"
    rows = [
        _row("batch sizes", _number_list(record.batch_sizes), _number_list(BATCH_SIZES)),
        _row("sparsities", _number_list(record.sparsities), _number_list(SPARSITIES)),
    ]
    for key, values in record.axes.items():
        rows.append(_row(key, ", ".join(map(str, values)), "-"))
    return [
        *rows,
        _row("trials per cell", str(record.trials), str(TRIALS)),
        _row("goal validation error", _number_list([goal.value, *record.goals]), of_paper[0]),
        _row("steps between validations", str(goal.check_interval), of_paper[1]),
        _row("max_steps", f"{goal.max_steps:,}", of_paper[2]),
        _row("trials stop at", limit, "max_steps"),
    ]


def _row(name: str, value: str, of_paper: str) -> dict[str, str]:
    return {"": name, "this study": value, "the paper": of_paper}


def _number_list(values: Iterable[float]) -> str:
    """Return numbers with commas between; "2, 4, ..., 16384" for many that double."""
    numbers = list(values)
    is_doubling = all(second == 2 * first for first, second in pairwise(numbers))
    if len(numbers) >= _MIN_ABBREVIATED and is_doubling:
        return f"{numbers[0]:g}, {numbers[1]:g}, ..., {numbers[-1]}"
    return ", ".join(map("{:.9g}".format, numbers))


def _theory_section(parts: Sequence[Part]) -> str:
    lines = ["## Theory\n", f"{_THEORY}\n"]
    for part in parts:
        text = Study(part.study.record, part.study).theory
        if text:
            lines.append(f"`{part.name}`:\n\n{code_block(text)}")
        else:
            lines.append(f"`{part.name}`: no terms were measured.\n")
    return "\n".join(lines)
