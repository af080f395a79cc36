"""The paper's claims judged on studies of one's own: one row a claim and study, or pair of studies.

The rules are fixed in advance, in `claims.scaling`, `claims.sparse`, `claims.search` and `claims.theory`; how a rule
becomes a verdict is in `claims.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lit_dps.analysis import Analysis
from lit_dps.replication.claims_scaling import diminishing_returns, linear_scaling, plateau
from lit_dps.replication.claims_search import rate_grows, region_grows
from lit_dps.replication.claims_sparse import critical_later, critical_no_earlier, critical_of_momentum, steps_of_sparse
from lit_dps.replication.claims_theory import lipschitz_rises, loss_stays, theory_tells, variance_falls
from lit_dps.replication.rules import Finding, Verdict


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        text: What it says.
        source: Where: the section, and figure, of Lee et al. 2021.
        paper: The paper's number, or how it says it.
        judge: Maps a study, or two, which may be the same, to a finding; None where the claim does not apply to them.
        studies: How many studies it takes.
    """

    text: str
    source: str
    paper: str
    judge: Callable[..., Finding | None]
    studies: int = 1


CLAIMS = (
    Claim(
        "steps fall in proportion to batch size where batches are small", "3.1, Figure 1", "K* ~ 1/B", linear_scaling
    ),
    Claim("larger batches give diminishing returns", "3.1, Figure 1", "K* B grows", diminishing_returns),
    Claim("the largest batches save no more steps", "3.1, Figure 1", "K* constant", plateau),
    Claim("90 % sparse networks need more steps", "3.1, Figure 12", "x1.5 to x4.5", steps_of_sparse),
    Claim(
        "the critical batch size of 90 % sparse networks is no smaller",
        "3.1, Figure 1",
        "same or larger",
        critical_no_earlier,
    ),
    Claim(
        "with momentum, the critical batch size of 90 % sparse networks is larger",
        "3.1, Figure 1",
        "larger",
        critical_later,
    ),
    Claim("momentum has a larger critical batch size than SGD", "3.1, Figure 2", "larger", critical_of_momentum, 2),
    Claim("the best learning rate grows with batch size", "3.2, Figure 3", "grows", rate_grows),
    Claim("the region of successful metaparameters grows with batch size", "3.2, Figure 3", "grows", region_grows),
    Claim(
        "L rises with sparsity",
        "4, Figure 4",
        "0.57 / 0.72 / 0.81 / 1.76 at 0 / 50 / 70 / 90 %: x3.09",
        lipschitz_rises,
    ),
    Claim("the gradient variance beta falls at 90 %", "4", "x0.54", variance_falls),
    Claim("the loss to go Delta is the same at 90 %", "4", "x1.00", loss_stays),
    Claim("Delta beta L tells the ratio of c1 at 90 %", "4", "x1.67", theory_tells, 2),
)


@dataclass(frozen=True)
class Judgement:
    """A claim judged on one study or pair of studies.

    Attributes:
        claim: The claim.
        studies: Names of the studies; none where it applies to none of them.
        measured: What they have, in a sentence with numbers.
        verdict: Whether they show the claim.
        command: What makes the studies, in a shell.
    """

    claim: Claim
    studies: tuple[str, ...]
    measured: str
    verdict: Verdict
    command: str


def judge(studies: Sequence[Analysis], commands: Mapping[str, str]) -> list[Judgement]:
    """All claims on all studies that they apply to, by claim, then study.

    Args:
        studies: Finished or not; what has finished counts.
        commands: The command that makes each study, by its name.
    """
    found = []
    for claim in CLAIMS:
        judged = [(group, claim.judge(*group)) for group in product(studies, repeat=claim.studies)]
        applied = [(group, finding) for group, finding in judged if finding is not None]
        for group, finding in applied:
            names = tuple(dict.fromkeys(study.record.name for study in group))
            command = " && ".join(commands[name] for name in names)
            found.append(Judgement(claim, names, finding.measured, finding.verdict, command))
        if not applied:
            found.append(Judgement(claim, (), "no study of it", Verdict.UNDECIDABLE, ""))
    return found


def overall(judgements: Sequence[Judgement]) -> dict[Claim, dict[Verdict, list[str]]]:
    """Each claim's verdicts, with the studies of each: "a" or, of a pair, "a against b"; none where there is none."""
    found: dict[Claim, dict[Verdict, list[str]]] = {}
    for judgement in judgements:
        named = [" against ".join(judgement.studies)] if judgement.studies else []
        found.setdefault(judgement.claim, {}).setdefault(judgement.verdict, []).extend(named)
    return found
