"""The page of the replication, short: each claim at the largest scale measured, the paper's
figures, what disagrees.

Nothing on it is written by hand but the sentences below, which are about the paper, and the same
whatever was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lit_dps.analysis.critical import DEFINITIONS
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.paper_protocol import BATCH_SIZES, TRIALS, WORKLOADS, classes
from lit_dps.core.trial import Status, TrialResult
from lit_dps.replication.appendix import Image, Machine, Part, escaped, judge_parts, progress, table
from lit_dps.replication.compared import searched
from lit_dps.replication.incomplete_cells import incomplete_cells
from lit_dps.replication.paper import Claim, Judgement, compared_with
from lit_dps.replication.rules import DENSE, LUCK_OF, POINT_LUCK, SPARSE, Verdict

UNDECIDABLE = Verdict.UNDECIDABLE
_ABOUT = (
    "Lee, Ajanthan, Torr and Jaggi, [Understanding the Effects of Data Parallelism and Sparsity "
    "on Neural Network "
    "Training](https://arxiv.org/abs/2003.11316) (ICLR 2021), measured again by lit_dps on real "
    "data."
)
_RULES = """\
A claim is a number in a range (`lit_dps/replication/`): seen where its 95 % interval, in brackets, lies within, not
seen where all of it lies outside, else undecided. The ranges were fixed before the first trial, that of "need more
steps", the other rules and the numbers of seeds while studies ran, after first verdicts. Medians are over
{seeds}seeds of the best points; their intervals allow for the luck of the points searched: of {of} points a batch size
x{dense:.2g} where S = 0, x{sparse:.2g} above. Each claim stands at the largest study that decides it, those at the
paper's goal first, else at the largest; beside it, those that decide otherwise."""
_WORDS = """\
B is the batch size, S the share of pruned weights, K\\* the fewest optimizer steps to the goal of any trial. The law is
K\\* = c1 / B + c2, and B_crit = c1 / c2. L, beta, Delta and epsilon are terms of the theory: smoothness,
gradient variance, loss to go, squared gradient ([all words](glossary.md)).
"""
_READING = """\
The paper reads them off its curves, where linear scaling ends, as powers of two. As measured, that is where the
examples B K\\* exceed those of the smallest batch size by 20 %; by the law, where they exceed c1 by 20 %, or are twice
as many (c1 / c2). Of K\\*, in examples, with 95 % intervals. A law far above the measured hides an early bend."""
_MARKS = {
    ">": " `>` is below all that can be told.",
    "*": " `*`: critical.csv of the study tells more.",
}
APART, UNEXPLAINED = "; the paper's number lies outside", "We have no explanation."
REGION = "metaparameters"
READINGS = "linear_20", "overhead", "law"  # of the critical batch size, shown
# What each figure of the paper shows, by the figure of ours that repeats it
FIGURES = {
    "scaling": (
        "Figure 1",
        "K\\* falls in proportion to 1/B, bends and goes flat, at every sparsity; sparser "
        "networks need more steps.",
    ),
    "optimizers": (
        "Figure 2",
        "Momentum and Nesterov go on scaling to larger batches than plain SGD does.",
    ),
    REGION: (
        "Figure 3",
        "Larger batches succeed in a larger region of learning rate and momentum, at higher "
        "effective rates.",
    ),
    "lipschitz": (
        "Figure 4",
        "The local Lipschitz constant along training is larger where networks are sparser.",
    ),
    "ratios": (
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
    """The page, of at least one study; `comparisons` are figures of several, by what they have in
    common.

    See `paper.compared_with`.
    """
    judgements = judge_parts(parts)
    chosen = headlines(judgements, parts)
    sections = [
        "# Replication\n",
        f"{_ABOUT} {_summary(chosen, parts)} [The appendix](replication-appendix.md) has every "
        "study and verdict.\n",
        _table(chosen, judgements, parts),
        f"{_rules(parts)}\n",
        _WORDS,
        *_figures(parts, comparisons),
        _critical(parts),
        _disagreements(chosen),
        _undecided(chosen, judgements, parts),
        f"## How it was made\n\n`{command}`\n\nMade {date} on {machine.cores} cores of "
        f"{machine.cpu}, "
        f"with torch {machine.torch}, from stored trials; their commands are in the appendix.\n",
    ]
    return "\n".join(sections)


def _rules(parts: Sequence[Part]) -> str:
    """How a claim is decided, with the numbers of seeds that medians are over, and the luck of the
    points searched."""
    counts = sorted(
        {len(point.results) for part in parts for point in part.study.repeats if point.results}
    )
    ends = dict.fromkeys(map(str, counts[:1] + counts[-1:]))
    dense, sparse = (math.exp(POINT_LUCK[sparsity]) for sparsity in (DENSE, SPARSE))
    return _RULES.format(
        seeds=f"{' to '.join(ends)} " if ends else "", of=LUCK_OF, dense=dense, sparse=sparse
    )


def scale(part: Part) -> tuple[bool, bool, int]:
    """How large a study is: whether it met the paper's goal or a harder one, whether it is whole,
    finished trials."""
    record = part.study.record
    paper = WORKLOADS.get(classes(record.config))
    own = paper is not None and record.goal.metric == VALIDATION_ERROR and not record.goal.at_least
    own = own and not record.goal.with_value(paper.error).is_easier(record.goal.value)
    own = own and any(result.status is Status.COMPLETE for result in part.runs("results"))
    return own, part.whole, progress(part.study)[0]


def span(part: Part) -> tuple[bool, int, int]:
    """How much of a figure a study fills: as `scale`, but its cells before its trials, which make a
    curve no longer."""
    own, _, trials = scale(part)
    return own, len(part.study.record.results), trials


def headlines(judgements: Iterable[Judgement], parts: Sequence[Part]) -> dict[Claim, Judgement]:
    """Each claim's verdict at the largest scale (`scale_of`) among those that decide it, if any
    does."""
    found: dict[Claim, Judgement] = {}

    def rank(judgement: Judgement) -> tuple:
        return judgement.verdict is not UNDECIDABLE, scale_of(judgement, parts)

    for judgement in judgements:
        if judgement.claim not in found or rank(judgement) > rank(found[judgement.claim]):
            found[judgement.claim] = judgement
    return found


def larger_undecided(
    chosen: Judgement, judgements: Iterable[Judgement], parts: Sequence[Part]
) -> Judgement | None:
    """The same claim at the largest scale, where that does not decide it and a smaller one does."""
    same = [judgement for judgement in judgements if judgement.claim is chosen.claim]
    largest = max(same, key=lambda judgement: scale_of(judgement, parts))
    return largest if scale_of(largest, parts) > scale_of(chosen, parts) else None


def scale_of(judgement: Judgement, parts: Sequence[Part]) -> tuple[bool, bool, int]:
    """The scale of a judgement's study, of a pair that of the smaller one; the least where there is
    none."""
    of = (scale(part) for part in parts if part.study.record.name in judgement.studies)
    return min(of, default=(False, False, 0))


def _summary(chosen: Mapping[Claim, Judgement], parts: Sequence[Part]) -> str:
    counts = Counter(judgement.verdict for judgement in chosen.values())
    runs = {kind: _distinct(parts, kind) for kind in ("results", "repeats")}
    steps = sum(run.steps_run for each in runs.values() for run in each)
    told = ", ".join(f"{counts[verdict]} {verdict.short}" for verdict in Verdict)
    left = [f"`{part.study.record.name}` at {part.left}" for part in parts if part.left]
    others = f" Under way and left out: {'; '.join(left)}." if left else ""
    decided = [each for each in chosen.values() if each.verdict is not UNDECIDABLE]
    own = sum(scale_of(judgement, parts)[0] for judgement in decided)
    shared = sum(len(part.runs("results")) for part in parts) - len(runs["results"])
    done = sum(progress(part.study)[0] for part in parts) - shared
    return (
        f"Of the paper's {len(chosen)} claims: {told}; decided at the paper's goal or a harder "
        f"one: {own}. By "
        f"{len(parts)} studies, {done:,} trials, {len(runs['repeats']):,} repeats of best points, "
        f"{steps:,} steps.{_extent(parts)}{others}"
    )


def _distinct(parts: Sequence[Part], kind: str) -> list[TrialResult]:
    """The runs of all studies (`Part.runs`); one that a study has from another, told by its
    seconds, counts once."""
    found = {
        (str(run.trial), run.seconds): run for part in reversed(parts) for run in part.runs(kind)
    }
    return list(found.values())


def _extent(parts: Sequence[Part]) -> str:
    """How far the searches at the paper's goal reach, beside the paper's."""
    records = [
        part.study.record for part in parts if scale(part)[0] and searched(part.study.record)
    ]
    reach = sorted(
        ((max(r.batch_sizes), min(map(len, r.results.values()))) for r in records), reverse=True
    )
    fewest: dict[
        int, int
    ] = {}  # trials of a cell up to a largest batch size, where no wider search has as many
    for largest, trials in reach:
        if trials > max(fewest.values(), default=0):
            fewest[largest] = trials
    ours = ", ".join(f"{trials} up to B = {largest:,}" for largest, trials in fewest.items())
    return (
        ours and f" Trials a cell at its goal: {ours} (the paper: {TRIALS}, {BATCH_SIZES[-1]:,})."
    )


def _table(
    chosen: Mapping[Claim, Judgement], judgements: Sequence[Judgement], parts: Sequence[Part]
) -> str:
    rows, above = [], None
    for claim, judgement in chosen.items():
        found = (judgement.measured, judgement.studies)
        ours, above = (
            "as above" if judgement.studies and found == above else judgement.measured,
            found,
        )
        larger = larger_undecided(judgement, judgements, parts)
        differ = [
            j
            for j in judgements
            if j.claim is claim and j.verdict not in (judgement.verdict, UNDECIDABLE)
        ]
        verdict = f"{judgement.verdict.short}{' at a smaller scale, undecided at the largest' if larger else ''}"
        rows.append(
            {
                "claim": f"{claim.text} ({claim.source})",
                "paper": claim.paper,
                "ours": ours,
                "study": f"`{judgement.where}`" if judgement.studies else "-",
                "verdict": "; ".join([verdict, *(f"{j.verdict} by `{j.where}`" for j in differ)]),
            }
        )
    return table(rows)


def _figures(parts: Sequence[Part], comparisons: Mapping[str, Sequence[Image]]) -> list[str]:
    """Each figure of the paper from the widest study (`span`), or studies to be compared, that have
    it."""
    sections = []
    for name, (number, shows) in FIGURES.items():
        widest = sorted(parts, key=lambda part, name=name: _rank(part, name), reverse=True)
        groups = dict.fromkeys(compared_with(part.study.record) for part in widest)
        images = [image for part in widest for image in part.images]
        images += [image for group in groups for image in comparisons.get(group, ())]
        image = next((image for image in images if image.name == name), None)
        if image is not None:
            sections.append(
                f"## {number}\n\nThe paper: {shows}\n\n![{image.caption}]({image.path})\n"
            )
    return sections


def _rank(part: Part, figure: str) -> tuple:
    """Whether a study is whole, at the paper's goal, and how wide; a raced one shows no region of
    success."""
    record, (own, *size) = part.study.record, span(part)
    return not incomplete_cells(record), own, figure == REGION and record.race_factor is None, *size


def _critical(parts: Sequence[Part]) -> str:
    """Critical batch sizes of each workload and rule, at its widest study, as a law has them and as
    the paper does.

    Of the studies at the paper's goal alone, where there are any.
    """
    rows, seen = [], set()
    shown = [
        part for part in parts if scale(part)[0] and len(part.study.record.batch_sizes) > 1
    ] or parts
    for part in sorted(shown, key=span, reverse=True):
        record = part.study.record
        if record.workload in seen or len(record.batch_sizes) < 2:
            continue
        seen.add(record.workload)
        for series, found in part.study.critical_batch_sizes.items():
            sizes = {f"{DEFINITIONS[name]}": str(found[name]) for name in READINGS}
            rows.append({"study": f"`{record.name}`", "series": str(series), **sizes})
    if not rows:
        return ""
    ends = {end for row in rows for text in row.values() for end in (text[:1], text[-1:])}
    marks = "".join(told for mark, told in _MARKS.items() if mark in ends)
    return f"## Critical batch sizes\n\n{_READING}{marks}\n\n{table(rows)}"


def _disagreements(chosen: Mapping[Claim, Judgement]) -> str:
    lines = [
        f"- **{escaped(claim.text)}**: {at.verdict.short}{APART * at.apart}. "
        f"{claim.explained or UNEXPLAINED}"
        for claim, at in chosen.items()
        if at.verdict is Verdict.NOT_SEEN or at.apart
    ]
    return "\n".join(["## Where it disagrees\n", *(lines or ["Nowhere."]), ""])


def _undecided(
    chosen: Mapping[Claim, Judgement], judgements: Sequence[Judgement], parts: Sequence[Part]
) -> str:
    """What the larger studies say, with their numbers where the verdict above is not of the paper's
    goal."""
    pairs = [
        (larger_undecided(j, judgements, parts), not scale_of(j, parts)[0]) for j in chosen.values()
    ]
    lines = [
        f"- **{escaped(j.claim.text)}**{f': {escaped(j.measured)}' * far} (`{j.where}`)"
        for j, far in pairs
        if j
    ]
    return "\n".join(["## Where the largest studies do not decide\n", *lines, ""]) if lines else ""
