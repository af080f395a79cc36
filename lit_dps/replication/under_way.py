"""Studies that grow over many sittings: what of them is measured so far that the page can be judged on."""

from __future__ import annotations

import dataclasses

from lit_dps.record import StudyRecord
from lit_dps.repeats import repeats_left
from lit_dps.trial import Cell


def under_way(record: StudyRecord) -> list[float]:
    """The sparsities of a study that have a cell without any finished trial, or where repeats are left to be run.

    Repeats count from the first one of the study on: they come after all trials.
    """
    begun = any(record.repeats.values())

    def waits(cell: Cell) -> bool:
        results = record.results[cell]
        return not results or (begun and bool(repeats_left(record.plan, results, record.repeats[cell])))

    return sorted({cell.sparsity for cell in record.results if waits(cell)})


def as_measured(record: StudyRecord) -> tuple[StudyRecord, list[float]]:
    """A study without the sparsities that are under way, and these; all of it, and none, where all are.

    A claim about all series would else be undecided by one that has a point or two, or no median.
    """
    left = under_way(record)
    kept = tuple(s for s in record.sparsities if s not in left)
    if not left or not kept:
        return record, []

    def only(by_cell):
        return {cell: found for cell, found in by_cell.items() if cell.sparsity in kept}

    of_cells = {key: only(getattr(record, key)) for key in ("results", "running", "repeats")}
    return dataclasses.replace(record, sparsities=kept, **of_cells), left
