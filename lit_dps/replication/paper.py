"""What the paper did and what it claims, beside studies of one's own.

The protocol of its workloads is from Section 2 and Appendix B of Lee et al. 2021. The claims are
judged a study, or pair of studies, at a time; their rules are in the files `claims_*` beside this
one, and how a rule becomes a verdict is in `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import lit_dps.replication.claims_critical as critical
import lit_dps.replication.claims_scaling as scaling
import lit_dps.replication.claims_terms as terms
import lit_dps.replication.claims_trials as trials
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.paper_protocol import (
    BATCH_SIZES,
    SPARSITIES,
    TRIALS,
    WORKLOADS,
    classes,
    workload,
)
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.replication.compared import searched
from lit_dps.replication.rules import Finding, Verdict


def compared_with(record: StudyRecord) -> str:
    """What the studies have in common that are drawn beside each other: what was trained on what,
    to which goal."""
    return f"{' '.join(workload(record))} {record.goal}"


def protocol_rows(record: StudyRecord) -> list[dict[str, str]]:
    """The protocol of a study beside the paper's of that workload, as text. Columns: "", this
    study, the paper."""
    goal, paper = record.goal, WORKLOADS.get(classes(record.config))
    theirs = (
        ("-",) * 3
        if paper is None
        else (f"{paper.error:g}", str(paper.check_interval), f"{paper.max_steps:,}")
    )
    slack = (
        "the budget" if record.race_factor is None else f"{record.race_factor:g} K* of their cell"
    )
    rows = [
        ("batch sizes", _listed(record.batch_sizes), _listed(BATCH_SIZES)),
        ("sparsities", _listed(record.sparsities), _listed(SPARSITIES)),
        *((key, ", ".join(map(str, values)), "-") for key, values in record.axes.items()),
        ("trials a cell", str(record.trials), str(TRIALS)),
        ("goal validation error", _listed([goal.value, *record.goals]), theirs[0]),
        ("steps between checks", str(goal.check_interval), theirs[1]),
        ("step budget", f"{goal.max_steps:,}", theirs[2]),
        ("trials stop at", slack, "the budget"),
    ]
    return [dict(zip(("", "this study", "the paper"), row, strict=True)) for row in rows]


def search_text(record: StudyRecord) -> str:
    """The search space of a study in a line."""
    names = short_names(list(record.space))
    return "; ".join(f"{names[key]} {box}" for key, box in record.space.items())


def _listed(values: Iterable[float]) -> str:
    """Numbers in a row; 2, 4, ..., 16384 where they are more than six and double."""
    values = list(values)
    if len(values) > 6 and all(b == 2 * a for a, b in pairwise(values)):
        return f"{values[0]:g}, {values[1]:g}, ..., {values[-1]}"
    return ", ".join(f"{value}" if isinstance(value, int) else f"{value:g}" for value in values)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    `judge` maps a study, or two, which may be the same, to a finding; to None where the claim does
    not apply to them. `explained` is what could explain it where a study disagrees.
    """

    text: str
    source: str  # section, and figure, of Lee et al. 2021
    paper: str  # the paper's number, or how it says it
    judge: Callable[..., Finding | None]
    studies: int = 1  # that it takes
    explained: str = ""
    # whether it is of a search; else a study of one's best points (study.best_of) serves too
    search: bool = True


_REGIMES, _SEARCH = "3.1, Figure 1", "3.2, Figure 3"
_CURVES = (
    "The paper reads critical batch sizes off its curves, where linear scaling ends; here they "
    "are c1 / c2 of a fitted "
    "law, which weighs all batch sizes alike."
)
CLAIMS = (
    Claim(
        "steps fall in proportion to batch size where batches are small",
        _REGIMES,
        "K* ~ 1/B",
        scaling.linear_scaling,
        explained="[Checks every 16 steps](studies/checks.md) let noisy runs at B = 2 meet the "
        "goal sooner: most of it "
        "for the dense network, little at 90 % sparsity. Neighbouring batch sizes share the best "
        "of few points.",
    ),
    Claim(
        "larger batches give diminishing returns",
        _REGIMES,
        "K* B grows",
        scaling.diminishing_returns,
    ),
    Claim("the largest batches save no more steps", _REGIMES, "K* constant", scaling.plateau),
    Claim(
        "90 % sparse networks need more steps",
        "3.1, Figure 12",
        "more",
        scaling.more_steps_of_sparse,
    ),
    Claim(
        "90 % sparse networks need 1.5 to 4.5 times the steps",
        "3.1, Figure 12",
        "x1.5 to x4.5",
        scaling.steps_of_sparse,
        explained="Both K* are minima over the points that were run, and fewer points succeed "
        "where networks are "
        "sparse: with fewer trials than the paper's 100, the sparse minimum is the less settled "
        "one, and the ratio too "
        "high.",
    ),
    Claim(
        "the critical batch size of 90 % sparse networks is no smaller",
        _REGIMES,
        "same or larger",
        critical.critical_no_earlier,
        explained=_CURVES,
    ),
    Claim(
        "with momentum, the critical batch size of 90 % sparse networks is larger",
        _REGIMES,
        "larger",
        critical.critical_later,
        explained=_CURVES,
    ),
    Claim(
        "momentum has a larger critical batch size than SGD",
        "3.1, Figure 2",
        "larger",
        critical.critical_of_momentum,
        studies=2,
    ),
    Claim("the best learning rate grows with batch size", _SEARCH, "grows", trials.rate_grows),
    Claim(
        "the region of successful metaparameters grows with batch size",
        _SEARCH,
        "grows",
        trials.region_grows,
    ),
    Claim(
        "L rises with sparsity",
        "4, Figure 4",
        "0.57, 0.72, 0.81, 1.76 at 0, 50, 70, 90 %: x3.09",
        terms.lipschitz_rises,
        search=False,
        explained="L changes along a run and with the rate, so that a mean depends on which "
        "trials, and how much of "
        "each, it is over.",
    ),
    Claim(
        "the gradient variance beta falls at 90 %", "4", "x0.54", terms.variance_falls, search=False
    ),
    Claim("the loss to go Delta is the same at 90 %", "4", "x1.00", terms.loss_stays, search=False),
    Claim(
        "Delta beta L tells the ratio of c1 at 90 %",
        "4",
        "x1.67",
        terms.theory_tells,
        studies=2,
        search=False,
        explained="The paper takes epsilon, the mean squared gradient along training, to be "
        "equal; the ratio over the "
        "measured one squared, which is rough, stands beside. The bounds are for plain SGD at a "
        "constant rate, beta is that at initialization, and L a mean of local estimates.",
    ),
)


@dataclass(frozen=True)
class Judgement:
    """A claim judged on one study or pair of studies."""

    claim: Claim
    studies: tuple[str, ...]  # their names; none where the claim applies to none of them
    measured: str  # what they have, in a sentence with numbers
    verdict: Verdict
    command: str  # what makes the studies, in a shell
    apart: bool = False  # whether the paper's number lies outside the interval

    @property
    def where(self) -> str:
        """The study, or of a pair the one against the other; empty where there is none."""
        return " against ".join(self.studies)


def judge(studies: Sequence[Analysis], commands: Mapping[str, str]) -> list[Judgement]:
    """All claims on all studies that they apply to, by claim, then study; `commands` make the
    studies, by name."""
    found = []
    for claim in CLAIMS:
        fit = [study for study in studies if searched(study.record) or not claim.search]
        judged = [(group, claim.judge(*group)) for group in product(fit, repeat=claim.studies)]
        applied = [(group, finding) for group, finding in judged if finding is not None]
        for group, finding in applied:
            names = tuple(dict.fromkeys(study.record.name for study in group))
            command = " && ".join(commands[name] for name in names)
            found.append(
                Judgement(claim, names, finding.measured, finding.verdict, command, finding.apart)
            )
        if not applied:
            found.append(Judgement(claim, (), "no study of it", Verdict.UNDECIDABLE, ""))
    return found


def overall(judgements: Sequence[Judgement]) -> dict[Claim, dict[Verdict, list[str]]]:
    """Each claim's verdicts, with where they were found; nowhere, if in no study."""
    found: dict[Claim, dict[Verdict, list[str]]] = {}
    for judgement in judgements:
        at = found.setdefault(judgement.claim, {}).setdefault(judgement.verdict, [])
        at += [judgement.where] if judgement.studies else []
    return found
