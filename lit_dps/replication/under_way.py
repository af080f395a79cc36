"""Studies that grow over many sittings: what of them is measured so far that the page can be judged on."""

from __future__ import annotations

import dataclasses

from lit_dps.record import StudyRecord
from lit_dps.repeats import repeats_left
from lit_dps.trial import Cell


def under_way(record: StudyRecord) -> list[Cell]:
    """The cells of a study without any finished trial, or where repeats are left to be run.

    Repeats count from the first one of the study on: they come after all trials.
    """
    begun = any(record.repeats.values())

    def waits(cell: Cell) -> bool:
        results = record.results[cell]
        return not results or (begun and bool(repeats_left(record.plan, results, record.repeats[cell])))

    return [cell for cell in record.results if waits(cell)]


def as_measured(record: StudyRecord) -> tuple[StudyRecord, str]:
    """A study without what is under way of it, and that in words; all of it, and "", where that leaves nothing.

    A claim about all series would else be undecided by one that has a point or two, or no median. Left out are whole
    sparsities, or whole batch sizes where that keeps more cells: a grid grows by either.
    """
    waiting = under_way(record)
    sparsities, batch_sizes = {cell.sparsity for cell in waiting}, {cell.batch_size for cell in waiting}
    ways = {
        f"S = {_listed(sparsities)}": [cell for cell in record.results if cell.sparsity not in sparsities],
        f"B = {_listed(batch_sizes)}": [cell for cell in record.results if cell.batch_size not in batch_sizes],
    }
    left, kept = max(ways.items(), key=lambda way: len(way[1]))  # of equals the first
    if not waiting or not kept:
        return record, ""
    of_cells = {key: {cell: getattr(record, key)[cell] for cell in kept} for key in ("results", "running", "repeats")}
    grid = {"sparsities": {cell.sparsity for cell in kept}, "batch_sizes": {cell.batch_size for cell in kept}}
    return dataclasses.replace(record, **{key: tuple(sorted(found)) for key, found in grid.items()}, **of_cells), left


def _listed(values: set[float]) -> str:
    return ", ".join(f"{value:.9g}" for value in sorted(values))
