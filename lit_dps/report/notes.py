"""A note of a report: a condition on the study, and the sentence that is printed if it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.text import counted
from lit_dps.core.trial import TrialResult

# Values of a sentence, by the name of their place in it.
Values = Mapping[str, object]

LISTED = 3  # trials, cells or parameters that a note names


class Level(IntEnum):
    """How harmful it is to overlook a note, the most harmful first."""

    UNUSABLE = 0  # the recommendation itself is uncertain: its times, or a value that it names
    WRONG = 1  # numbers are missing, cannot be compared, or mean something else
    WEAK = 2  # numbers are bounds, or less certain than their intervals
    INFO = 3  # how the study was made


@dataclass(frozen=True)
class Note:
    """What to know of a study before trusting its numbers.

    Attributes:
        condition: Yields the values of the templates, once for each time that the note holds.
        sentence: A template of `str.format`, one sentence: what happened, and what to do.
        detail: A template of further sentences, which the end of a study leaves out.
        level: How harmful it is to overlook the note. The end of a study leaves out `Level.INFO`.
    """

    condition: Callable[[Analysis], Iterable[Values]]
    sentence: str
    detail: str = ""
    level: Level = Level.INFO


def lines_of(notes: Iterable[Note], study: Analysis, has_details: bool = True) -> list[str]:
    """Return the texts of the notes that hold, in their order, each once.

    Args:
        notes: The notes.
        study: The study.
        has_details: Whether the texts include `Note.detail`.
    """
    lines = []
    for note in notes:
        template = note.sentence
        if has_details:
            template = f"{note.sentence} {note.detail}"
        for values in note.condition(study):
            lines.append(template.format(**values).strip())
    return list(dict.fromkeys(lines))


def warnings_of(notes: Iterable[Note], study: Analysis, has_details: bool = False) -> list[str]:
    """Return the notes that hold and are no mere information, the most harmful first, each once.

    Args:
        notes, study, has_details: As of `lines_of`.
    """
    warnings = [note for note in notes if note.level < Level.INFO]
    return lines_of(sorted(warnings, key=lambda note: note.level), study, has_details)


def finished_trials(study: Analysis) -> list[TrialResult]:
    """Return all finished trials of a study, by cell; not its repeats."""
    results = []
    for cell in study.record.trained_cells:
        results += study.record.results[cell]
    return results


def count_trials(results: Sequence[TrialResult]) -> str:
    """Return the number of trials: 1 trial, 5 trials."""
    return counted(len(results), "trial")


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
