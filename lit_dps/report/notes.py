"""A note of a report: a condition on the study, and the sentence that is printed if it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import TrialResult

# Values of a sentence, by the name of their place in it.
Values = Mapping[str, object]

LISTED = 3  # trials, cells or parameters that a note names


@dataclass(frozen=True)
class Note:
    """A note below the table of a study.

    Attributes:
        condition: Yields the values of the sentence, once for each time that the note holds.
        sentence: A template of `str.format`: what happened, then what to do.
    """

    condition: Callable[[Analysis], Iterable[Values]]
    sentence: str


def lines_of(notes: Iterable[Note], study: Analysis) -> list[str]:
    """Return the sentences of the notes that hold, in their order, each once."""
    lines = []
    for note in notes:
        for values in note.condition(study):
            lines.append(note.sentence.format(**values))
    return list(dict.fromkeys(lines))


def finished_trials(study: Analysis) -> list[TrialResult]:
    """Return all finished trials of a study, by cell; not its repeats."""
    results = []
    for cell in study.record.trained_cells:
        results += study.record.results[cell]
    return results


def count_trials(results: Sequence[TrialResult]) -> str:
    """Return the number of trials: 1 trial, 5 trials."""
    return count_of(len(results))


def count_of(trials: int) -> str:
    """Return a number of trials with its noun: 1 trial, 5 trials."""
    if trials == 1:
        return "1 trial"
    return f"{trials} trials"


def were(results: Sequence[TrialResult]) -> str:
    """Return the number of trials with its verb: 1 trial was, 5 trials were."""
    if len(results) == 1:
        return "1 trial was"
    return f"{len(results)} trials were"


def first_names(names: Sequence[str]) -> list[str]:
    """Return the first names of a list, and how many more there are."""
    if len(names) <= LISTED:
        return list(names)
    return [*names[:LISTED], f"{len(names) - LISTED} more"]


def percent(share: float) -> str:
    """Return a share as text: 12.5 %."""
    return f"{100 * share:.3g} %"
