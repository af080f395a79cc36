"""The page of the replication: each claim at the largest scale, the paper's figures, disagreements.

Only the sentences below are written by hand. They are about the paper, and do not depend on what
was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lit_dps import TrialResult
from lit_dps.analysis import DEFINITIONS, noise_of_search
from lit_dps.core.paper_protocol import BATCH_SIZES, TRIALS
from lit_dps.replication.claims import Claim, Judgement
from lit_dps.replication.comparable import is_search, workload_and_goal
from lit_dps.replication.incomplete_cells import incomplete_cells
from lit_dps.replication.parts import Image, Machine, Part, escaped, judge_parts, scale_of, table
from lit_dps.replication.rules import Verdict

_ABOUT = (
    "Lee, Ajanthan, Torr and Jaggi, [Understanding the Effects of Data Parallelism and Sparsity "
    "on Neural Network Training](https://arxiv.org/abs/2003.11316) (ICLR 2021), measured again by "
    "lit_dps on real data."
)
_RULES = """\
A claim gives a number and its range (`lit_dps/replication/claims.yaml`). The claim is seen if the
whole 95 % interval of the number, in brackets, is in the range, and not seen if the whole interval
is outside; otherwise it is undecided. The ranges were fixed before the first trial, except for
"need more steps". This range, the other rules and the numbers of seeds were settled while studies
ran, after first verdicts. Medians are over {seeds} of the best points. Their intervals include the
noise of the search: with {points} samples of learning rate and momentum per batch size a factor of
{factor:.2g}. Each row shows the largest study that reaches a verdict, studies at the paper's goal
first; if none reaches one, the largest study. Studies with the contrary verdict are listed beside
it."""
_EXAMPLE_POINTS = 25  # samples for which the page shows the noise of the search
_WORDS = """\
B is the batch size, S the share of pruned weights, K\\* the fewest optimizer steps to the goal of
any trial. The law is K\\* = c1 / B + c2, and B_crit = c1 / c2. L, beta, Delta and epsilon are terms
of the theory: smoothness, gradient variance, loss to go, squared gradient
([glossary](glossary.md)).
"""
_CRITICAL = """\
The paper reads critical batch sizes off its curves, where linear scaling ends, as powers of two.
Here "measured" is where a run needs 20 % more examples B K\\* than at the smallest batch size, and
"law" where the fitted law needs 20 % more than c1 examples, or twice as many (c1 / c2). All are of
K\\*, in examples, with 95 % intervals. Where the fitted value is far above the measured one, the
curve bends earlier than the formula can show."""
_MARKS = {
    ">": " `>`: only this lower bound is known.",
    "*": " `*`: critical.csv of the study has a remark.",
}
_UNEXPLAINED = "We have no explanation."
_CRITICAL_DEFINITIONS = ("linear_20", "overhead", "law")
_SUCCESS_REGION = "metaparameters"  # the figure that a raced study cannot show


class PaperFigure(NamedTuple):
    """A figure of the paper: its number and what it shows."""

    number: str
    shows: str


# By the figure of ours that repeats it.
FIGURES = {
    "scaling": PaperFigure(
        "Figure 1",
        "K\\* falls in proportion to 1/B, bends and goes flat, at every sparsity; sparser networks "
        "need more steps.",
    ),
    "optimizers": PaperFigure(
        "Figure 2", "Momentum and Nesterov scale to larger batches than plain SGD."
    ),
    _SUCCESS_REGION: PaperFigure(
        "Figure 3",
        "Larger batches succeed in a larger region of learning rate and momentum, at higher "
        "effective rates.",
    ),
    "lipschitz": PaperFigure(
        "Figure 4",
        "The local Lipschitz constant along training is larger where networks are sparser.",
    ),
    "ratios": PaperFigure(
        "Figure 12",
        "A 90 % sparse network needs about 1.5 to 4.5 times the steps of the dense one.",
    ),
}


def replication_page(
    parts: Sequence[Part],
    comparisons: Mapping[str, Sequence[Image]],
    machine: Machine,
    command: str,
    date: str,
) -> str:
    """Return the page, of at least one study; arguments as of `appendix.appendix_page`."""
    judgements = judge_parts(parts)
    chosen = headlines(judgements, parts)
    sections = [
        "# Replication\n",
        f"{_ABOUT} {_summary(chosen, parts)} [The appendix](replication-appendix.md) has every "
        "study and verdict.\n",
        _table(chosen, judgements, parts),
        f"{_rules(parts)}\n",
        _WORDS,
        *_figure_sections(parts, comparisons),
        _critical_section(parts),
        _disagreements(chosen),
        _undecided(chosen, judgements, parts),
        f"## How it was made\n\n`{command}`\n\nMade {date} on {machine.cores} cores of "
        f"{machine.cpu}, with torch {machine.torch}, from stored trials; their commands are in "
        "the appendix.\n",
    ]
    return "\n".join(sections)


def headlines(judgements: Iterable[Judgement], parts: Sequence[Part]) -> dict[Claim, Judgement]:
    """Return the judgement that each claim is shown with.

    It is at the largest scale (`scale_of`) among those that decide the claim; if none does, among
    all. Only studies that may carry the verdict count (`Claim.judged_on`).
    """
    chosen: dict[Claim, Judgement] = {}
    for judgement in judgements:
        claim = judgement.claim
        if not claim.may_carry(judgement.studies):
            continue
        if claim not in chosen or _rank(judgement, parts) > _rank(chosen[claim], parts):
            chosen[claim] = judgement
    return chosen


def _rank(judgement: Judgement, parts: Sequence[Part]) -> tuple:
    is_decided = judgement.verdict is not Verdict.UNDECIDABLE
    return is_decided, scale_of(judgement, parts)


def larger_undecided(
    chosen: Judgement, judgements: Iterable[Judgement], parts: Sequence[Part]
) -> Judgement | None:
    """Return the same claim at the largest scale if that is larger than the chosen one, else None.

    It does not decide the claim, or it would have been chosen.
    """
    largest = chosen
    for judgement in judgements:
        is_larger = scale_of(judgement, parts) > scale_of(largest, parts)
        if judgement.claim is chosen.claim and is_larger:
            largest = judgement
    if largest is chosen:
        return None
    return largest


def _summary(chosen: Mapping[Claim, Judgement], parts: Sequence[Part]) -> str:
    """Return how many claims are seen, and how many studies, trials and steps that rests on."""
    counts: Counter[Verdict] = Counter()
    at_papers_goal = 0
    for judgement in chosen.values():
        counts[judgement.verdict] += 1
        if judgement.verdict is not Verdict.UNDECIDABLE:
            at_papers_goal += scale_of(judgement, parts).at_papers_goal
    count_texts = [f"{counts[verdict]} {verdict.short}" for verdict in Verdict]
    trials: list[TrialResult] = []
    repeats: list[TrialResult] = []
    finished = 0
    incomplete = []
    for part in reversed(parts):
        trials += part.trials
        repeats += part.repeats
        finished += part.finished
        if part.incomplete:
            incomplete.insert(0, f"`{part.name}` at {part.incomplete}")
    distinct_trials = _distinct(trials)
    distinct_repeats = _distinct(repeats)
    finished -= len(trials) - len(distinct_trials)
    steps = sum(run.steps_run for run in (*distinct_trials, *distinct_repeats))
    text = (
        f"Of the paper's {len(chosen)} claims: {', '.join(count_texts)}; decided at the paper's "
        f"goal or a harder one: {at_papers_goal}. By {len(parts)} studies, {finished:,} trials, "
        f"{len(distinct_repeats):,} repeats of best points, {steps:,} steps."
    )
    text += _extent(parts)
    if incomplete:
        text += f" Incomplete and left out: {'; '.join(incomplete)}."
    return text


def _distinct(runs: Iterable[TrialResult]) -> list[TrialResult]:
    """Return some runs; one that a study has from another counts once.

    Two runs of one trial are the same if their seconds are.
    """
    distinct = {}
    for run in runs:
        distinct[str(run.trial), run.seconds] = run
    return list(distinct.values())


def _extent(parts: Sequence[Part]) -> str:
    """Return how far the searches at the paper's goal reach, beside the paper's; "" without any."""
    reach = []
    for part in parts:
        record = part.study.record
        if part.scale.at_papers_goal and is_search(record):
            fewest_trials = min(map(len, record.results.values()))
            reach.append((max(record.batch_sizes), fewest_trials))
    # A search counts if all searches that reach farther have fewer trials per cell.
    texts = []
    most_trials = 0
    for largest, trials in sorted(reach, reverse=True):
        if trials > most_trials:
            texts.append(f"{trials} up to B = {largest:,}")
            most_trials = trials
    if not texts:
        return ""
    paper = f"{TRIALS}, {BATCH_SIZES[-1]:,}"
    return f" Trials per cell at its goal: {', '.join(texts)} (the paper: {paper})."


def _table(
    chosen: Mapping[Claim, Judgement], judgements: Sequence[Judgement], parts: Sequence[Part]
) -> str:
    """Return the table of claims."""
    rows = []
    previous: Judgement | None = None
    for claim, judgement in chosen.items():
        measured = judgement.measured
        if judgement.studies and previous is not None and _same_number(judgement, previous):
            measured = "as above"
        previous = judgement
        rows.append(
            {
                "claim": f"{claim.claim} ({claim.section})",
                "paper": claim.paper,
                "ours": measured,
                "study": f"`{judgement.where}`" if judgement.studies else "-",
                "verdict": _verdict_text(judgement, judgements, parts),
            }
        )
    return table(rows)


def _same_number(judgement: Judgement, other: Judgement) -> bool:
    return (judgement.measured, judgement.studies) == (other.measured, other.studies)


def _verdict_text(
    judgement: Judgement, judgements: Sequence[Judgement], parts: Sequence[Part]
) -> str:
    """Return the verdict of a claim, with the studies that have the contrary one."""
    text = judgement.verdict.short
    if larger_undecided(judgement, judgements, parts) is not None:
        text += " at a smaller scale, undecided at the largest"
    for other in judgements:
        is_contrary = other.verdict not in (judgement.verdict, Verdict.UNDECIDABLE)
        if other.claim is judgement.claim and is_contrary:
            text += f"; {other.verdict} by `{other.where}`"
    return text


def _rules(parts: Sequence[Part]) -> str:
    """Return how a claim is decided, with the numbers of seeds and the noise of the search."""
    counts = set()
    for part in parts:
        for point in part.study.repeats:
            if point.results:
                counts.add(len(point.results))
    seeds = "seeds"
    if len(counts) == 1:
        seeds = f"{min(counts)} seeds"
    elif counts:
        seeds = f"{min(counts)} to {max(counts)} seeds"
    noise = noise_of_search(_EXAMPLE_POINTS, dimensions=2)
    return _RULES.format(seeds=seeds, points=_EXAMPLE_POINTS, factor=math.exp(noise))


def _figure_sections(
    parts: Sequence[Part], comparisons: Mapping[str, Sequence[Image]]
) -> list[str]:
    """Return a section for each figure of the paper that a study, or a comparison, repeats."""
    sections = []
    for name, figure in FIGURES.items():
        image = _widest_image(name, parts, comparisons)
        if image is not None:
            sections.append(
                f"## {figure.number}\n\nThe paper: {figure.shows}\n\n"
                f"![{image.caption}]({image.path})\n"
            )
    return sections


def _widest_image(
    name: str, parts: Sequence[Part], comparisons: Mapping[str, Sequence[Image]]
) -> Image | None:
    """Return a figure of the widest study that has it, or of the widest studies compared."""

    def rank(part: Part) -> tuple:
        record = part.study.record
        is_complete = not incomplete_cells(record)
        # The race ends trials that would have succeeded.
        shows_region = name == _SUCCESS_REGION and record.race_factor is None
        width = part.width
        return is_complete, width.at_papers_goal, shows_region, width.cells, width.trials

    images = []
    compared = []
    for part in sorted(parts, key=rank, reverse=True):
        images += part.images
        compared += comparisons.get(workload_and_goal(part.study.record), ())
    for image in images + compared:
        if image.name == name:
            return image
    return None


def _critical_section(parts: Sequence[Part]) -> str:
    """Return the critical batch sizes of each workload and rule, at its widest study.

    Only studies at the paper's goal count, if there are any. Empty without any curve.
    """
    curves = [part for part in parts if len(part.study.record.batch_sizes) > 1]
    curves.sort(key=lambda part: part.width, reverse=True)  # those at the paper's goal first
    rows = []
    workloads = set()
    for part in curves:
        if curves[0].scale.at_papers_goal and not part.scale.at_papers_goal:
            break
        if part.study.record.workload in workloads:
            continue
        workloads.add(part.study.record.workload)
        for series, critical in part.study.critical_batch_sizes.items():
            row = {"study": f"`{part.name}`", "series": str(series)}
            for definition in _CRITICAL_DEFINITIONS:
                row[DEFINITIONS[definition]] = str(critical[definition])
            rows.append(row)
    if not rows:
        return ""
    return f"## Critical batch sizes\n\n{_CRITICAL}{_marks_of(rows)}\n\n{table(rows)}"


def _marks_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return what the marks mean that a table has."""
    ends = set()
    for row in rows:
        for text in row.values():
            ends.update((text[:1], text[-1:]))
    text = ""
    for mark, meaning in _MARKS.items():
        if mark in ends:
            text += meaning
    return text


def _disagreements(chosen: Mapping[Claim, Judgement]) -> str:
    """Return the claims that are not seen, or whose number is not the paper's."""
    lines = []
    for claim, judgement in chosen.items():
        if judgement.verdict is not Verdict.NOT_SEEN and not judgement.paper_is_outside:
            continue
        text = judgement.verdict.short
        if judgement.paper_is_outside:
            text += "; the paper's number is outside"
        explanation = claim.explanation or _UNEXPLAINED
        lines.append(f"- **{escaped(claim.claim)}**: {text}. {explanation}")
    return "\n".join(["## Where it disagrees\n", *(lines or ["Nowhere."]), ""])


def _undecided(
    chosen: Mapping[Claim, Judgement], judgements: Sequence[Judgement], parts: Sequence[Part]
) -> str:
    """Return what larger studies measured that do not decide a claim; empty without any.

    With their numbers if the verdict in the table is not of the paper's goal.
    """
    lines = []
    for judgement in chosen.values():
        larger = larger_undecided(judgement, judgements, parts)
        if larger is None:
            continue
        measured = ""
        if not scale_of(judgement, parts).at_papers_goal:
            measured = f": {escaped(larger.measured)}"
        lines.append(f"- **{escaped(larger.claim.claim)}**{measured} (`{larger.where}`)")
    if not lines:
        return ""
    return "\n".join(["## Where the largest studies do not decide\n", *lines, ""])
