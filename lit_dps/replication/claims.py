"""The claims of the paper, read from `claims.yaml`, and judged on studies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from lit_dps import ConfigError
from lit_dps.analysis import Analysis
from lit_dps.replication import optimizers, region, scaling, search, terms
from lit_dps.replication.comparable import is_search
from lit_dps.replication.rules import (
    ClaimRange,
    Finding,
    Measurements,
    Verdict,
    judge,
    verdict_of,
)

CLAIMS_FILE = Path(__file__).with_name("claims.yaml")
AGAINST = " against "  # between the names of two studies that are judged together
NO_STUDY = "no study measured it"
RANGE_SET = ("before", "after")  # the first trial


class Quantity(NamedTuple):
    """What `claims.yaml` can name as a quantity.

    Attributes:
        measure: A function `(study, **arguments)`, or `(study, other, **arguments)` for a pair. It
            returns a `Measurement` per series: a number with its interval, and a sentence; None for
            studies that it does not apply to.
        studies: How many studies it takes.
    """

    measure: Callable[..., Measurements | None]
    studies: int = 1


QUANTITIES = {
    "exponent_at_small_batches": Quantity(scaling.exponent_at_small_batches),
    "examples_ratio": Quantity(scaling.examples_ratio),
    "steps_per_doubling": Quantity(scaling.steps_per_doubling),
    "sparse_steps_ratio": Quantity(scaling.sparse_steps_ratio),
    "sparse_critical_ratio": Quantity(scaling.sparse_critical_ratio),
    "sparse_ratio_trend": Quantity(scaling.sparse_ratio_trend),
    "law_misfit": Quantity(scaling.law_misfit),
    "critical_ratio_of_optimizers": Quantity(optimizers.critical_ratio_of_optimizers, studies=2),
    "steps_ratio_of_optimizers": Quantity(optimizers.steps_ratio_of_optimizers, studies=2),
    "steps_ratio_change_of_optimizers": Quantity(
        optimizers.steps_ratio_change_of_optimizers, studies=2
    ),
    "rate_trend": Quantity(search.rate_trend),
    "success_trend": Quantity(search.success_trend),
    "share_inside": Quantity(region.share_inside),
    "rate_range_ratio": Quantity(region.rate_range_ratio),
    "effective_rate_kappa": Quantity(region.effective_rate_kappa),
    "term_ratio": Quantity(terms.term_ratio),
    "c1_over_theory": Quantity(terms.c1_over_theory, studies=2),
}


@dataclass(frozen=True, eq=False)  # claims are keys by identity: their arguments have no hash
class Claim:
    """A claim of the paper; `claims.yaml` explains the attributes."""

    id: str
    claim: str
    section: str
    paper: str
    quantity: str
    range: ClaimRange
    judged_on: Sequence[str]
    sensitivity: Sequence[str]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    requires: Mapping[str, Any] = field(default_factory=dict)
    paper_value: float | None = None
    best_points: bool = False
    range_set: str = "before"
    figure: str = ""
    question: str = ""
    explanation: str = ""

    @property
    def studies(self) -> int:
        """The number of studies that it is judged on together."""
        return QUANTITIES[self.quantity].studies

    def judge(self, *studies: Analysis) -> Finding | None:
        """Return the finding on a study, or a pair; None if the claim does not apply to it."""
        for key, value in self.requires.items():
            if studies[0].record.setting(key) != value:
                return None
        measurements = QUANTITIES[self.quantity].measure(*studies, **self.arguments)
        if measurements is None:
            return None
        return judge(measurements, self.range, self.paper_value)

    def takes(self, study: Analysis) -> bool:
        """Return True if a study is judged: by its name, its search, and its K*.

        K* is the minimum of steps, or of examples, which steps give.
        """
        record = study.record
        if not record.statistic.is_minimum or not record.goal.cost_unit.has_law:
            return False
        if not self.best_points and not is_search(study.record):
            return False
        patterns = list(self.sensitivity)
        for pattern in self.judged_on:
            patterns += pattern.split(AGAINST)
        return any(fnmatchcase(study.record.name, pattern) for pattern in patterns)

    def place(self, where: str) -> int | None:
        """Return the place of a judgement in `judged_on`; None if it may not carry the verdict.

        Args:
            where: The study, or "one against another" (`Judgement.where`).
        """
        for place, pattern in enumerate(self.judged_on):
            if fnmatchcase(where, pattern):
                return place
        return None


@cache
def paper_claims() -> tuple[Claim, ...]:
    """Return the claims of the paper, in its order."""
    return load_claims(CLAIMS_FILE)


def load_claims(path: Path) -> tuple[Claim, ...]:
    """Return the claims of a YAML file.

    Raises:
        ConfigError: For an entry without a required key, with an unknown key, quantity or argument,
            or with an id that is not unique.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims: dict[str, Claim] = {}
    for entry in content["claims"]:
        claim = _parse_claim({**content["defaults"], **entry})
        if claim.id in claims:
            raise ConfigError("claims.id", claim.id, "a name that no other claim has")
        claims[claim.id] = claim
    return tuple(claims.values())


def _parse_claim(entry: Mapping[str, Any]) -> Claim:
    """Return the claim of an entry, after checking what it names."""
    name = entry.get("id", entry)
    fields = dict(entry)
    try:
        if "range" in fields:
            fields["range"] = _parse_range(fields["range"])
        claim = Claim(**fields)
    except TypeError as error:  # it names the key that is missing or unknown
        raise ConfigError("claims", name, f"the keys that claims.yaml explains ({error})") from None
    if claim.range_set not in RANGE_SET:
        raise ConfigError(f"claims.{name}.range_set", claim.range_set, " or ".join(RANGE_SET))
    if claim.quantity not in QUANTITIES:
        allowed = f"any of {', '.join(QUANTITIES)}"
        raise ConfigError(f"claims.{name}.quantity", claim.quantity, allowed)
    studies = [None] * claim.studies
    try:
        signature = inspect.signature(QUANTITIES[claim.quantity].measure)
        signature.bind(*studies, **claim.arguments)
    except TypeError as error:
        allowed = f"arguments of {claim.quantity} ({error})"
        raise ConfigError(f"claims.{name}.arguments", claim.arguments, allowed) from None
    return claim


def _parse_range(limits: Mapping[str, float | str]) -> ClaimRange:
    numbers = {}
    for key, value in limits.items():
        # A number, or a ratio such as 1/1.1.
        parts = str(value).split("/")
        numbers[key] = float(parts[0])
        for divisor in parts[1:]:
            numbers[key] /= float(divisor)
    return ClaimRange(**numbers)


@dataclass(frozen=True)
class Judgement:
    """A claim judged on one study or pair of studies.

    Attributes:
        claim: The claim.
        studies: Their names; empty if the claim applies to none.
        measured: What they measured, in a sentence with numbers.
        verdict: The verdict.
        command: What makes the studies, in a shell.
        paper_is_outside: Whether the paper's number is outside the interval.
        measurements: What was judged, by series.
    """

    claim: Claim
    studies: tuple[str, ...]
    measured: str
    verdict: Verdict
    command: str
    paper_is_outside: bool = False
    measurements: Measurements = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The study, or "one against another"; empty without a study."""
        return AGAINST.join(self.studies)


def judge_claims(
    studies: Sequence[Analysis],
    commands: Mapping[str, str],
    claims: Sequence[Claim] | None = None,
) -> list[Judgement]:
    """Return the judgements of all claims on all studies that they apply to, by claim, then study.

    A claim that no study may carry has one more, undecided judgement without a study.

    Args:
        studies: The studies.
        commands: What makes each study, in a shell, by the study's name.
        claims: The claims; by default the paper's.
    """
    if claims is None:
        claims = paper_claims()
    judgements = []
    for claim in claims:
        of_claim = _judge_claim(claim, studies, commands)
        judgements += of_claim
        if all(claim.place(judgement.where) is None for judgement in of_claim):
            judgements.append(Judgement(claim, (), NO_STUDY, Verdict.UNDECIDABLE, ""))
    return judgements


def _judge_claim(
    claim: Claim, studies: Sequence[Analysis], commands: Mapping[str, str]
) -> list[Judgement]:
    """Return the judgements of a claim on the studies, or pairs, that it applies to."""
    judgements = []
    for group in product(filter(claim.takes, studies), repeat=claim.studies):
        finding = claim.judge(*group)
        if finding is None:
            continue
        # A pair may be one study twice, which is named once.
        of_group = {}
        for study in group:
            of_group[study.record.name] = commands[study.record.name]
        judgements.append(
            Judgement(
                claim, tuple(of_group), command=" && ".join(of_group.values()), **finding._asdict()
            )
        )
    return judgements


def studies_by_verdict(
    judgements: Sequence[Judgement],
) -> dict[Claim, dict[Verdict, list[str]]]:
    """Return the studies of each claim and verdict; an empty list if no study is judged."""
    studies: dict[Claim, dict[Verdict, list[str]]] = {}
    for judgement in judgements:
        of_claim = studies.setdefault(judgement.claim, {})
        of_verdict = of_claim.setdefault(judgement.verdict, [])
        if judgement.studies:
            of_verdict.append(judgement.where)
    return studies


def claims_frame(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """Return one row for each claim, study and series: the number, its interval and the range.

    `can_refute` is that of `Measurement`.
    `verdict` is of the series, `verdict_of_study` of all series together. `place` is that of the
    study in `Claim.judged_on`; the least one carries the verdict.
    """
    rows = []
    for judgement in judgements:
        claim = judgement.claim
        for series, measurement in judgement.measurements.items():
            row: dict[str, object] = {"claim": claim.id, "study": judgement.where, "series": series}
            if measurement.number is not None:
                row["value"] = measurement.number.value
                row["low"], row["high"] = measurement.number.interval
            row["above"], row["at_most"] = claim.range
            row["can_refute"] = measurement.can_refute
            row["verdict"] = verdict_of(measurement, claim.range).short
            row["verdict_of_study"] = judgement.verdict.short
            row["place"] = claim.place(judgement.where)
            rows.append(row)
    columns = ["claim", "study", "series", "value", "low", "high", "above", "at_most"]
    columns += ["can_refute", "verdict", "verdict_of_study", "place"]
    return pd.DataFrame(rows, columns=columns)
