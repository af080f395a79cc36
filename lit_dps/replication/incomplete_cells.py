"""Studies that grow over many sittings: what of them is measured so far that the page can be judged
on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import combinations

from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import missing_repeats
from lit_dps.core.trial import Cell
from lit_dps.replication.rules import FEWEST

# of the trials of the cell that has most: K* of fewer points is higher, by more than is allowed for
FEWEST_OF = 0.5


def incomplete_cells(record: StudyRecord) -> list[Cell]:
    """The cells of a study with too few finished trials (`FEWEST_OF`), or without repeats that a
    median can rest on.

    These are the first `FEWEST` of a point, or all that are planned, without a gap: one that was
    stopped while later ones ended needs more steps than they, and a median without it is too low.
    So a study whose repeats grow from 5 to 20 keeps the cells that have 5. Repeats count from the
    first one of the study on: they come after all trials. A cell whose best point is newer than its
    repeats is none: to leave it out until they are run would keep those alone that more points did
    not improve.
    """
    begun = any(record.repeats.values())
    least = FEWEST_OF * max(map(len, record.results.values()))

    def waits(cell: Cell) -> bool:
        results = record.results[cell]
        if not results or len(results) < least:
            return True
        if not begun:
            return False
        left = set(missing_repeats(record.plan, results, record.repeats[cell]))
        ran = {(result.trial.point, result.trial.repeat) for result in record.repeats[cell]}
        last = dict(sorted(ran)) or dict.fromkeys(
            (point for point, _ in left), 0
        )  # of each point, the last that ran
        return any(point in last and number <= max(FEWEST, last[point]) for point, number in left)

    return [cell for cell in record.results if waits(cell)]


def complete_subset(record: StudyRecord) -> tuple[StudyRecord, str]:
    """A study without what is under way of it, and that in words; all of it, and "", where nothing
    is whole.

    A claim about all series would else be undecided by one that has a point or two, or no median.
    Of the grids of some sparsities by some batch sizes without a cell under way, the largest is
    kept; of equals that of fewer sparsities, whose curves are longer.
    """
    waiting = {(cell.sparsity, cell.batch_size) for cell in incomplete_cells(record)}
    some = (
        chosen
        for n in range(1, len(record.sparsities) + 1)
        for chosen in combinations(record.sparsities, n)
    )
    grids = (
        (ss, tuple(b for b in record.batch_sizes if waiting.isdisjoint((s, b) for s in ss)))
        for ss in some
    )
    sparsities, batch_sizes = max(grids, key=lambda grid: len(grid[0]) * len(grid[1]))
    if not waiting or not batch_sizes:
        return record, ""
    kept = [
        cell
        for cell in record.results
        if cell.sparsity in sparsities and cell.batch_size in batch_sizes
    ]
    of_cells = {
        key: {cell: getattr(record, key)[cell] for cell in kept}
        for key in ("results", "running", "repeats")
    }
    left = [
        _told("S", set(record.sparsities) - {*sparsities}),
        _told("B", set(record.batch_sizes) - {*batch_sizes}),
    ]
    found = dataclasses.replace(record, sparsities=sparsities, batch_sizes=batch_sizes, **of_cells)
    if all(left):  # what is left out is no grid
        return found, f"all but {_told('S', sparsities)} and {_told('B', batch_sizes)}"
    return found, "".join(left)


def _told(name: str, values: Iterable[float]) -> str:
    told = ", ".join(f"{value:.9g}" for value in sorted(values))
    return told and f"{name} = {told}"
