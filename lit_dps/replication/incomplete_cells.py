"""Studies that grow over several runs: which part is complete enough to judge claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from lit_dps import Cell, StudyRecord
from lit_dps.replication.estimates import MIN_SAMPLES

# A cell is incomplete if it has less than this share of the trials of the fullest cell. K* of so
# few points is too high, by more than the noise of a search includes.
MIN_SHARE_OF_TRIALS = 0.5
MIN_BATCH_SIZES = 3  # of a part that compares sparsities, since the law has two constants


def incomplete_cells(record: StudyRecord) -> list[Cell]:
    """Return the cells of a study with too few finished trials, or too few repeats for a median.

    Too few trials are less than `MIN_SHARE_OF_TRIALS`, where failed trials do not count. Repeats
    count as soon as the study has one, since they run after all trials.
    """
    counts = {cell: len(record.results_without_failed(cell)) for cell in record.results}
    most = max(counts.values())
    has_repeats = any(record.repeats.values())
    incomplete = []
    for cell, count in counts.items():
        has_few_trials = not count or count < MIN_SHARE_OF_TRIALS * most
        if has_few_trials or (has_repeats and _lacks_repeats(record, cell)):
            incomplete.append(cell)
    return incomplete


def _lacks_repeats(record: StudyRecord, cell: Cell) -> bool:
    """Return True if a cell lacks repeats for the median of its best point.

    The median needs the first `MIN_SAMPLES` repeats of a point, or all planned repeats, without a
    gap. A repeat that is unfinished while later repeats have ended needs more steps than these, so
    a median without it is too low. A study whose repeats grow from 5 to 20 keeps the cells with 5.

    A cell whose best point is newer than its repeats lacks no repeats. To omit the cell until its
    repeats have run would keep only the cells that new points did not improve.
    """
    missing = record.missing_repeats(cell)
    last_repeats = {}
    for result in record.repeats[cell]:
        point = result.trial.point
        last_repeats[point] = max(last_repeats.get(point, 0), result.trial.repeat)
    for point, number in missing:
        has_repeats = point in last_repeats or not last_repeats
        if has_repeats and number <= max(MIN_SAMPLES, last_repeats.get(point, 0)):
            return True
    return False


def complete_subset(record: StudyRecord) -> tuple[StudyRecord, str]:
    """Return a study without its incomplete cells, and the incomplete cells as text.

    One incomplete series would leave a claim on all series undecided. The result is the largest
    grid of sparsities and batch sizes without an incomplete cell. Of two equally large grids, it is
    the grid with fewer sparsities, because its curves are longer. If all cells or no cells are
    complete, the result is the entire study and "".
    """
    sparsities, batch_sizes = _largest_grid(record)
    if not batch_sizes or not incomplete_cells(record):
        return record, ""
    return _without_other_cells(record, sparsities, batch_sizes)


def sparse_subset(record: StudyRecord) -> tuple[StudyRecord, str] | None:
    """Return the part that compares sparsities, if `complete_subset` has only one of them.

    It is the largest grid of at least two sparsities, and is named like the study and "-sparse".
    With fewer than `MIN_BATCH_SIZES` batch sizes it is None.
    """
    if len(_largest_grid(record)[0]) > 1:
        return None
    sparsities, batch_sizes = _largest_grid(record, fewest_sparsities=2)
    if len(batch_sizes) < MIN_BATCH_SIZES:
        return None
    subset, dropped = _without_other_cells(record, sparsities, batch_sizes)
    return replace(subset, name=f"{record.name}-sparse"), dropped


def _without_other_cells(
    record: StudyRecord, sparsities: Sequence[float], batch_sizes: Sequence[int]
) -> tuple[StudyRecord, str]:
    """Return a grid of a study, and the other cells as text."""
    dropped_sparsities = _axis_text("S", set(record.sparsities) - set(sparsities))
    dropped_batch_sizes = _axis_text("B", set(record.batch_sizes) - set(batch_sizes))
    dropped = dropped_sparsities + dropped_batch_sizes
    if dropped_sparsities and dropped_batch_sizes:
        # The incomplete cells are no grid.
        dropped = f"all but {_axis_text('S', sparsities)} and {_axis_text('B', batch_sizes)}"
    return record.subset(sparsities, batch_sizes), dropped


def _largest_grid(
    record: StudyRecord, fewest_sparsities: int = 1
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the sparsities and batch sizes of the largest grid without an incomplete cell."""
    incomplete = {(cell.sparsity, cell.batch_size) for cell in incomplete_cells(record)}
    largest: tuple[tuple[float, ...], tuple[int, ...]] = ((), ())
    for count in range(fewest_sparsities, len(record.sparsities) + 1):
        for sparsities in combinations(record.sparsities, count):
            batch_sizes = []
            for batch_size in record.batch_sizes:
                if not any((sparsity, batch_size) in incomplete for sparsity in sparsities):
                    batch_sizes.append(batch_size)
            if len(sparsities) * len(batch_sizes) > len(largest[0]) * len(largest[1]):
                largest = (sparsities, tuple(batch_sizes))
    return largest


def _axis_text(name: str, values: Iterable[float]) -> str:
    """Return values of an axis in words, such as "S = 0.5, 0.9"; "" for no values."""
    texts = list(map("{:.9g}".format, sorted(values)))
    if not texts:
        return ""
    return f"{name} = {', '.join(texts)}"
