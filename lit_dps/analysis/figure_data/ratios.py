"""How many times the steps of a dense network a sparse one needs (Lee et al. 2021, Figure 12), as rows."""

from __future__ import annotations

from collections.abc import Sequence

from lit_dps.analysis.ratios import bounds, ratios
from lit_dps.analysis.scaling import FittedStudy
from lit_dps.analysis.text import Row


def ratio_rows(studies: Sequence[FittedStudy]) -> list[Row]:
    """K* over K* of the smallest sparsity at the same batch size, by study, sparsity, then batch size.

    Without those in which a K* is at the first check: they are only bounds.

    Columns: study, sparsity, base_sparsity, batch_size [examples], ratio, and its 95 % limits ratio_low and ratio_high,
    None where there are no trials to resample.
    """
    rows: list[Row] = []
    for study in studies:
        for ratio in ratios(study.record):
            low, high = (None, None) if ratio.interval is None else ratio.interval
            row: Row = {"study": study.record.name, "sparsity": ratio.cell.sparsity, "base_sparsity": ratio.base}
            row |= {"batch_size": ratio.cell.batch_size, "ratio": ratio.value, "ratio_low": low, "ratio_high": high}
            rows.append(row)
    return rows


def ratios_missing(studies: Sequence[FittedStudy]) -> str | None:
    """Why there is no ratio to draw, if so."""
    if any(ratios(study.record, replicates=1) for study in studies):
        return None
    if all(len(study.record.sparsities) == 1 for study in studies):
        return "one sparsity only"
    if any(bounds(study.record) for study in studies):
        return "no batch size has a K* beyond the first check both at the smallest sparsity and above it"
    return "no batch size has a K* both at the smallest sparsity and above it"


def ratios_notes(studies: Sequence[FittedStudy]) -> list[str]:
    """Studies that have no dense cells to compare with, and ratios left out since they are only bounds."""
    sparse = [(study.record.name, min(study.record.sparsities)) for study in studies]
    notes = [f"no dense cells in {name}: its ratios are to S = {base:g}" for name, base in sparse if base > 0]
    if left := sum(len(bounds(study.record)) for study in studies):
        known = sum(len(ratios(study.record, replicates=1)) for study in studies)
        notes.append(f"K* at the first check in {left} of {known + left} ratios: only bounds, not drawn")
    return notes
