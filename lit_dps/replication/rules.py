"""How a claim is decided: a number with its 95 % interval against a range.

A claim gives a number and its range. The claim is *seen* if the whole interval is in the range,
*not seen* if the whole interval is outside, and *not decidable at this scale* otherwise. The
intervals include the random choice of trials, by resampling, and the check interval, which limits
the precision of K*. Only medians over seeds also include other initial weights and orders of the
data (`estimates`).

A claim about several series is seen if it is seen in all series, and not seen if it is not seen in
one series. The sentence then lists the verdicts by series.

`claims.yaml` records whether a range was fixed before the first trial of a study at the paper's
scale. The other rules, such as the choice of quantities and intervals, were settled while such
studies ran. The commits have dates and reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from lit_dps.replication.estimates import Estimate

# A shared beginning of several sentences is written once if it has at least this many words.
MIN_SHARED_WORDS = 3


class Verdict(StrEnum):
    """The result of a claim on a study."""

    SEEN = "seen"
    NOT_SEEN = "not seen"
    UNDECIDABLE = "not decidable at this scale"

    @property
    def short(self) -> str:
        """The verdict in one or two words."""
        if self is Verdict.UNDECIDABLE:
            return "undecided"
        return str(self)


class ClaimRange(NamedTuple):
    """The range (above, at_most] of the number of a claim."""

    above: float = -math.inf
    at_most: float = math.inf

    def __str__(self) -> str:
        if self.at_most == math.inf:
            return f"above {self.above:.3g}"
        if self.above == -math.inf:
            return f"at most {self.at_most:.3g}"
        return f"above {self.above:.3g}, at most {self.at_most:.3g}"


@dataclass(frozen=True)
class Measurement:
    """A quantity in one series, or one pair of series.

    Attributes:
        sentence: The result, with numbers.
        number: The number that is judged; None if it is unknown. The claim is then undecided.
        can_refute: False if the study does not reach the batch sizes that the claim is about. The
            number can then confirm the claim, not refute it.
        uses_medians: Whether the number uses medians over seeds instead of K*.
        notes: Further facts, which follow the sentence.
    """

    sentence: str
    number: Estimate | None = None
    can_refute: bool = True
    uses_medians: bool = False
    notes: tuple[str, ...] = ()


# By series. The name is empty for the only pair of a study whose series differ in sparsity alone.
Measurements = Mapping[str, Measurement]


class Finding(NamedTuple):
    """A verdict and its evidence.

    Attributes:
        verdict: The verdict.
        measured: A sentence with the numbers.
        paper_is_outside: Whether the paper's number is outside the interval.
        measurements: The judged measurements, by series.
    """

    verdict: Verdict
    measured: str
    paper_is_outside: bool
    measurements: Measurements


def judge(
    measurements: Measurements, claim_range: ClaimRange, paper_value: float | None = None
) -> Finding:
    """Return the verdict on a claim from the measurements in each series.

    Args:
        measurements: The claimed number in each series, at least one.
        claim_range: The range that the claim gives.
        paper_value: The paper's number; None without one. It is only reported.
    """
    verdicts = {}
    sentences = {}
    paper_is_outside = False
    prefix = ""
    if "" not in measurements and all(each.uses_medians for each in measurements.values()):
        prefix = "medians: "
    for name, measurement in measurements.items():
        verdicts[name] = verdict_of(measurement, claim_range)
        text = measurement.sentence
        if measurement.uses_medians and not prefix:
            text += " (medians)"
        notes = list(measurement.notes)
        if _is_outside(paper_value, measurement.number):
            paper_is_outside = True
            notes.append(f"the paper's x{paper_value:g} is outside the interval")
        sentences[name] = "; ".join([text, *notes])
    text = prefix + together(sentences)
    if len(set(verdicts.values())) > 1:
        text += f"; {_by_verdict(verdicts)}"
    return Finding(combined(verdicts.values()), text, paper_is_outside, measurements)


def decide(number: Estimate | None, claim_range: ClaimRange) -> Verdict:
    """Return whether a number is in a range; undecidable without a number."""
    if number is None:
        return Verdict.UNDECIDABLE
    low, high = number.interval
    if low > claim_range.above and high <= claim_range.at_most:
        return Verdict.SEEN
    if high <= claim_range.above or low > claim_range.at_most:
        return Verdict.NOT_SEEN
    return Verdict.UNDECIDABLE


def verdict_of(measurement: Measurement, claim_range: ClaimRange) -> Verdict:
    """Return the verdict in one series."""
    verdict = decide(measurement.number, claim_range)
    if verdict is Verdict.NOT_SEEN and not measurement.can_refute:
        return Verdict.UNDECIDABLE
    return verdict


def _is_outside(value: float | None, number: Estimate | None) -> bool:
    """Return True if a value is outside the interval of a number; False without one of them."""
    if value is None or number is None:
        return False
    return not number.interval.low <= value <= number.interval.high


def combined(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim about several cases, all of which must agree."""
    distinct = set(verdicts)
    if Verdict.NOT_SEEN in distinct:
        return Verdict.NOT_SEEN
    if distinct == {Verdict.SEEN}:
        return Verdict.SEEN
    return Verdict.UNDECIDABLE


def _by_verdict(verdicts: Mapping[str, Verdict]) -> str:
    """Return which verdict holds at which series: "seen at S=0, undecided at S=0.9"."""
    names_by_verdict: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for name, verdict in verdicts.items():
        names_by_verdict[verdict].append(name)
    parts = []
    for verdict, names in names_by_verdict.items():
        if names:
            parts.append(f"{verdict.short} at {', '.join(names)}")
    return ", ".join(parts)


def together(sentences: Mapping[str, str]) -> str:
    """Return the sentences on several series as one sentence.

    Equal sentences are written once. Otherwise the words before the number, up to a colon or an
    equals sign, are written once if all sentences share them.
    """
    if "" in sentences:
        return sentences[""]
    if len(set(sentences.values())) == 1:
        return f"{', '.join(sentences)}: {next(iter(sentences.values()))}"
    beginning = _shared_beginning(list(sentences.values()))
    parts = []
    for name, sentence in sentences.items():
        if beginning:
            # Notes follow the name.
            number, mark, notes = sentence.removeprefix(beginning).partition("; ")
            parts.append(f"{number} at {name}{mark}{notes}")
        else:
            parts.append(f"{name}: {sentence}")
    return beginning + "; ".join(parts)


def _shared_beginning(sentences: list[str]) -> str:
    """Return the words before the number if all sentences share at least `MIN_SHARED_WORDS`."""
    words = []
    for word in min(sentences, key=len).split(" "):
        words.append(word)
        if word.endswith((":", "=")):
            break
    beginning = " ".join([*words, ""])
    is_before_number = words[-1].endswith((":", "="))
    if not is_before_number or len(words) < MIN_SHARED_WORDS:
        return ""
    if not all(sentence.startswith(beginning) for sentence in sentences):
        return ""
    return beginning
