"""The page of the replication: each claim at the largest scale, the paper's figures, disagreements.

Only the sentences below are written by hand. They are about the paper, and do not depend on the
measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lit_dps import TrialResult
from lit_dps.analysis import DEFINITIONS, noise_of_search
from lit_dps.core.paper_protocol import BATCH_SIZES, TRIALS
from lit_dps.replication.claims import AGAINST, Claim, Judgement
from lit_dps.replication.comparable import is_search, workload_and_goal
from lit_dps.replication.estimates import is_misfit
from lit_dps.replication.incomplete_cells import incomplete_cells
from lit_dps.replication.parts import (
    Image,
    Machine,
    Part,
    escaped,
    judge_parts,
    run_key,
    scale_of,
    table,
)
from lit_dps.replication.rules import Verdict

_ABOUT = (
    "Lee, Ajanthan, Torr and Jaggi, [Understanding the Effects of Data Parallelism and Sparsity "
    "on Neural Network Training](https://arxiv.org/abs/2003.11316) (ICLR 2021), measured again by "
    "lit_dps on real data."
)
_RULES = """\
A claim gives a number and its range (`lit_dps/replication/claims.yaml`). The claim is seen if the
whole 95 % interval of the number, in brackets, is in the range, at each sparsity. It is not seen if
the whole interval is outside at one sparsity. Otherwise it is undecided. Claims 3, 7, 8, 9 and 21
use the fitted law. They are undecided at a sparsity where the law misses K\\* by more than 20 %.
Claims 3, 7, 8 and 9 also need an identifiable B_crit. The row gives the reason. A
study that does not reach the small or large batches of a claim can show it, but not refute it
(`can_refute` in claims.csv). One study carries the verdict; of equally large ones, one that
decides. The column also names other studies that decide the claim; some of these share trials.
Ranges marked \\* were chosen after trials had run. The other ranges were fixed before the first
trial at the paper's scale. The other rules, the numbers of seeds, and which study carries a
verdict, were settled while studies ran. Medians are over {seeds} of the best points. Their
intervals include the noise of the search: with {points} samples of learning rate and momentum per
batch size a factor of {factor:.2g}."""
_EXAMPLE_POINTS = 25  # samples for which the page shows the noise of the search
_WORDS = """\
B is the batch size, S the share of pruned weights, K\\* the fewest optimizer steps to the goal of
any trial. The law is K\\* = c1 / B + c2, and B_crit = c1 / c2. L, beta, Delta and epsilon are terms
of the theory: smoothness, gradient variance, loss to go, squared gradient
([glossary](concepts.md#glossary)).
"""
_CRITICAL = """\
The paper reads critical batch sizes off its curves, where linear scaling ends, as powers of two.
Here "measured, +20 %" is the batch size at which a run needs 20 % more examples B K\\* than at the
smallest batch size. "law, +20 %" is the same batch size by the fitted law. At "law, 2x" (c1 / c2),
the law needs twice the examples of a tiny batch. All three use K\\*, are in examples, and have 95 %
intervals. If the fitted value is far above the measured value, the curve bends earlier than the
formula can show."""
_MARKS = {
    ">": " `>`: only a lower bound is known.",
    "*": " `*`: the law misses K\\* by more than 20 %, or critical.csv of the study has a note.",
}
_ANSWERS = {
    Verdict.SEEN: "Yes,",
    Verdict.NOT_SEEN: "No,",
    Verdict.UNDECIDABLE: "Not decided",
}
_MARK_OF = {Verdict.SEEN: "+", Verdict.NOT_SEEN: "-", Verdict.UNDECIDABLE: "?"}
# The workloads of the paper (Appendix C, Figures 7 to 11), by the name in a study.
WORKLOADS = {
    "MNIST-SimpleCNN-sgd": "MNIST, SGD",
    "MNIST-SimpleCNN-momentum": "MNIST, momentum",
    "MNIST-SimpleCNN-nesterov": "MNIST, Nesterov",
    "FashionMNIST-SimpleCNN-sgd": "Fashion-MNIST, SGD",
    "FashionMNIST-SimpleCNN-momentum": "Fashion-MNIST, momentum",
    "FashionMNIST-SimpleCNN-nesterov": "Fashion-MNIST, Nesterov",
    "CIFAR10-ResNet8-sgd": "CIFAR-10, SGD",
    "CIFAR10-ResNet8-momentum": "CIFAR-10, momentum",
    "CIFAR10-ResNet8-sgd-linear-decay": "CIFAR-10, SGD, linear decay",
    "CIFAR10-ResNet8-momentum-linear-decay": "CIFAR-10, momentum, linear decay",
    "CIFAR10-ResNet8-nesterov-linear-decay": "CIFAR-10, Nesterov, linear decay",
}
# The page, and the folder beside it with its images, stored trials and numbers.
PAGE = "replication"
CLAIMS_CSV = "claims.csv"
CELLS_CSV = "cells.csv"
_UNEXPLAINED = "We have no explanation."
_CRITICAL_DEFINITIONS = ("linear_20", "overhead", "law")
_OF_LAW = ("overhead", "law")
_SUCCESS_REGION = "metaparameters"  # the figure that a raced study cannot show
_CURVE = "scaling"  # the figure of K* against B


class PaperFigure(NamedTuple):
    """A figure of the paper: its number and what it shows."""

    number: str
    shows: str


# By the figure of ours that repeats it.
FIGURES = {
    _CURVE: PaperFigure(
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
        f"{_ABOUT} {_extent_of(parts)} [The appendix](replication-appendix.md) has every study and "
        f"verdict; [claims.csv]({PAGE}/{CLAIMS_CSV}) and [cells.csv]({PAGE}/{CELLS_CSV}) have "
        "the numbers.\n",
        _short_section(chosen, parts),
        "## Claims\n",
        _table(chosen, judgements),
        f"{_rules(parts)}\n",
        _WORDS,
        _workloads_section(judgements, parts),
        *_figure_sections(parts, comparisons, chosen),
        _critical_section(parts),
        _disagreements(chosen),
        f"## How it was made\n\n`{command}`\n\nMade {date} on {machine.cores} cores of "
        f"{machine.cpu}, with torch {machine.torch}, from stored trials. The appendix has the "
        "commands that ran them. You can load the stored trials of a single study in seconds:\n",
        f"```python\n{_load_example(parts)}\n```\n",
    ]
    return "\n".join(sections)


def _load_example(parts: Sequence[Part]) -> str:
    """Return Python code that reads the largest study from the file beside the page."""
    name = max(parts, key=lambda part: part.scale).name
    path = f"docs/{PAGE}/studies/{name}.db.xz"
    return f'import lit_dps\n\nfile = "{path}"\nlit_dps.load("{name}", storage=file).cells'


def headlines(judgements: Iterable[Judgement], parts: Sequence[Part]) -> dict[Claim, Judgement]:
    """Return the judgement that carries the verdict of each claim (`Claim.judged_on`)."""
    chosen: dict[Claim, Judgement] = {}
    for judgement in judgements:
        claim = judgement.claim
        place = claim.place(judgement.where)
        if judgement.studies and place is None:
            continue
        if claim not in chosen or _rank(judgement, parts) > _rank(chosen[claim], parts):
            chosen[claim] = judgement
    return chosen


def _rank(judgement: Judgement, parts: Sequence[Part]) -> tuple:
    """Return the rank of a judgement. The highest rank carries the verdict of its claim.

    Of two judgements on studies of one scale, such as a study alone and in a pair, the one that
    decides comes first.
    """
    place = judgement.claim.place(judgement.where)
    if not judgement.studies or place is None:
        place = math.inf
    is_decided = judgement.verdict is not Verdict.UNDECIDABLE
    return -place, scale_of(judgement, parts), is_decided


def _short_section(chosen: Mapping[Claim, Judgement], parts: Sequence[Part]) -> str:
    """Return which claims are seen, not seen and undecided, and the answers to two questions."""
    lines = ["## In short\n"]
    names = {
        Verdict.SEEN: "Seen here",
        Verdict.NOT_SEEN: "Not seen here",
        Verdict.UNDECIDABLE: "Undecided",
        None: "Not measured",
    }
    claims: dict[Verdict | None, list[str]] = {verdict: [] for verdict in names}
    for claim, judgement in chosen.items():
        verdict = judgement.verdict if judgement.studies else None
        claims[verdict].append(escaped(claim.claim))
    for verdict, name in names.items():
        if claims[verdict]:
            count = f"{len(claims[verdict])} of {len(chosen)}"
            lines.append(f"- **{name}** ({count}): {'; '.join(claims[verdict])}.")
    for claim, judgement in chosen.items():
        if claim.question and judgement.studies:
            lines.append(
                f"- **{escaped(claim.question)}** {_ANSWERS[judgement.verdict]} by "
                f"`{judgement.where}`: "
                f"{escaped(judgement.measured)}. {claim.explanation}"
            )
    at_goal = 0
    for judgement in chosen.values():
        if judgement.verdict is not Verdict.UNDECIDABLE:
            at_goal += scale_of(judgement, parts).at_papers_goal
    lines.append(f"\nDecided by studies at the paper's goal: {at_goal} of {len(chosen)}.\n")
    return "\n".join(lines)


def _extent_of(parts: Sequence[Part]) -> str:
    """Return how many studies, trials and steps the page uses, and which cells it omits."""
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
    studies = sum(not part.is_subset for part in parts)
    count = "1 study" if studies == 1 else f"{studies} studies"
    text = (
        f"The evidence is {count} with {finished:,} trials, "
        f"{len(distinct_repeats):,} repeats of best points and {steps:,} steps.{_reach(parts)}"
    )
    if incomplete:
        text += f" Incomplete cells are omitted: {'; '.join(incomplete)}."
    return text


def _distinct(runs: Iterable[TrialResult]) -> list[TrialResult]:
    """Return some runs without duplicates (`run_key`)."""
    return list({run_key(run): run for run in runs}.values())


def _reach(parts: Sequence[Part]) -> str:
    """Return the extent of the searches at the paper's goal, and of the paper's; "" without any."""
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
    paper = f"{TRIALS} up to B = {BATCH_SIZES[-1]:,}"
    return f" Trials per cell at the paper's goal: {', '.join(texts)} (the paper: {paper})."


def _table(chosen: Mapping[Claim, Judgement], judgements: Sequence[Judgement]) -> str:
    """Return the table of claims."""
    rows = []
    previous = None
    for number, (claim, judgement) in enumerate(chosen.items(), start=1):
        measured = judgement.measured
        same = (measured, judgement.studies)
        if judgement.studies and same == previous:
            measured = "as above"
        previous = same
        rows.append(
            {
                "claim": f"{number}. {claim.claim} ({claim.section})",
                "paper": claim.paper,
                "ours": measured,
                "seen if": f"{claim.range}{'*' if claim.range_set == 'after' else ''}",
                "study": f"`{judgement.where}`" if judgement.studies else "-",
                "verdict": _verdict_text(judgement, judgements),
            }
        )
    return table(rows)


def _verdict_text(judgement: Judgement, judgements: Sequence[Judgement]) -> str:
    """Return the verdict of a claim, with the verdicts of other studies that decide it."""
    text = judgement.verdict.short
    for verdict in (Verdict.SEEN, Verdict.NOT_SEEN):
        others = []
        for other in judgements:
            if other.claim is judgement.claim and other.verdict is verdict and other != judgement:
                others.append(f"`{other.where}`")
        if others and verdict is judgement.verdict:
            text += f"; also by {len(others)} other{'s' if len(others) > 1 else ''}"
        elif others:
            text += f"; {verdict} by {', '.join(others)}"
    return text


def _workloads_section(judgements: Sequence[Judgement], parts: Sequence[Part]) -> str:
    """Return the verdict on each claim at each workload of the paper, at the paper's goal."""
    workloads = {part.name: part.study.record.workload for part in parts}
    numbers: dict[str, int] = {}
    best: dict[tuple[str, str], Judgement] = {}
    for judgement in judgements:
        claim = judgement.claim
        numbers.setdefault(claim.id, len(numbers) + 1)
        if not judgement.studies or not scale_of(judgement, parts).at_papers_goal:
            continue
        key = workloads[judgement.studies[0]], claim.id
        if key not in best or _rank(judgement, parts) > _rank(best[key], parts):
            best[key] = judgement
    rows = []
    for workload, name in WORKLOADS.items():
        row = {"workload": name}
        for claim_id, number in numbers.items():
            judgement = best.get((workload, claim_id))
            row[str(number)] = _MARK_OF[judgement.verdict] if judgement else " "
        rows.append(row)
    return (
        "## The paper's workloads\n\nVerdicts on the claims of the table above, at the paper's "
        "goal: + seen, - not seen, ? undecided. Empty: not measured "
        "([the time that it takes](results.md#what-the-replication-lacks)).\n\n" + table(rows)
    )


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
    parts: Sequence[Part],
    comparisons: Mapping[str, Sequence[Image]],
    chosen: Mapping[Claim, Judgement],
) -> list[str]:
    """Return a section for each figure of the paper that a study or a comparison repeats."""
    sections = []
    for name, figure in FIGURES.items():
        ours = []
        judged = []
        claims_by_study: dict[str, list[int]] = {}
        for number, (claim, judgement) in enumerate(chosen.items(), start=1):
            if claim.figure == name:
                verdict = judgement.verdict.short
                ours.append(f"{escaped(claim.claim)} (claim {number}): {verdict}")
                judged += judgement.studies
                if judgement.studies:
                    claims_by_study.setdefault(judgement.where, []).append(number)
        shown = _shown_image(name, parts, comparisons, judged)
        if shown is None:
            continue
        image, studies = shown
        sections.append(
            f"## {figure.number}\n\nThe paper: {figure.shows}\n\nOurs: {'; '.join(ours)}.\n\n"
            f"![{image.caption}]({image.path})\n\n"
            f"{_shown_studies(studies, claims_by_study)}\n"
        )
    return sections


def _shown_studies(studies: Sequence[str], claims_by_study: Mapping[str, Sequence[int]]) -> str:
    """Return what a figure shows, and other studies that decide its claims (by their numbers)."""
    text = f"The figure shows {', '.join(map('`{}`'.format, studies))}."
    for where, numbers in claims_by_study.items():
        if not set(where.split(AGAINST)) <= set(studies):
            claims = ", ".join(map(str, numbers))
            plural = "s" if len(numbers) > 1 else ""
            text += (
                f" `{where}`, which carries the verdict on claim{plural} {claims}, is not shown."
            )
    return text


def _shown_image(
    name: str,
    parts: Sequence[Part],
    comparisons: Mapping[str, Sequence[Image]],
    judged: Sequence[str],
) -> tuple[Image, Sequence[str]] | None:
    """Return a figure with the names of its studies; None if there is none.

    Complete studies at the paper's goal come first, then those on which most of its claims were
    judged, then the widest. A curve is of the widest study, which has the most batch sizes.

    Args:
        name: The name of the figure.
        parts: The studies.
        comparisons: Figures of several studies, by what they share.
        judged: The studies on which its claims were judged.
    """

    def rank(part: Part) -> tuple:
        record = part.study.record
        is_complete = not incomplete_cells(record)
        # The race stops trials that would have succeeded.
        shows_region = name == _SUCCESS_REGION and record.race_factor is None
        width = part.width
        carried = 0 if name == _CURVE else judged.count(part.name)
        return is_complete, width.at_papers_goal, shows_region, carried, width.cells, width.trials

    ranked = sorted(parts, key=rank, reverse=True)
    for part in ranked:
        for image in part.images:
            if image.name == name:
                return image, (part.name,)
    for part in ranked:
        for image in comparisons.get(workload_and_goal(part.study.record), ()):
            if image.name == name:
                return image, image.studies
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
                found = critical[definition]
                if definition in _OF_LAW and is_misfit(part.study.laws[series]):
                    found = replace(found, note="the law misses K*")
                row[DEFINITIONS[definition]] = str(found)
            rows.append(row)
    if not rows:
        return ""
    return f"## Critical batch sizes\n\n{_CRITICAL}{_marks_of(rows)}\n\n{table(rows)}"


def _marks_of(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the meaning of the marks in a table."""
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
    """Return the claims that are not seen, or whose interval excludes the paper's number."""
    lines = []
    for claim, judgement in chosen.items():
        if judgement.verdict is not Verdict.NOT_SEEN and not judgement.paper_is_outside:
            continue
        text = judgement.verdict.short
        if judgement.paper_is_outside:
            text += "; the paper's number is outside the interval"
        explanation = claim.explanation or _UNEXPLAINED
        lines.append(f"- **{escaped(claim.claim)}**: {text}. {explanation}")
    return "\n".join(["## Where it disagrees\n", *(lines or ["Nowhere."]), ""])
