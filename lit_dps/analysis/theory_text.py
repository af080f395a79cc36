"""The theory's terms and ratios as text, for the report of a study."""

from __future__ import annotations

import math

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.series import base_of, short_columns
from lit_dps.analysis.tables import Row, aligned, k_star_text, records, significant, three_digits, times
from lit_dps.trial import Series

NO_CHANGE = 1.1  # a term within this factor counts as unchanged

_TERMS = {"delta": "Delta", "lipschitz": "L", "beta": "beta", "epsilon": "epsilon", "rate": "mean rate"}
_LAWS = {
    "predicted_c1": "predicted c1",
    "c1": "fitted c1",
    "predicted_c2": "predicted c2",
    "c2": "fitted c2",
    "predicted_k_star": "predicted K*",
}
_RATIOS = {
    "delta": "Delta",
    "beta": "beta",
    "lipschitz": "L",
    "epsilon": "epsilon",
    "predicted_c1": "predicted c1",
    "predicted_c1_measured_epsilon": "by epsilon^2",
    "c1": "fitted c1",
    "k_star": "K*",
}


def theory_text(analysis: Analysis) -> str:
    """The section of a report on the theory: terms, ratios, a sentence per series; empty if nothing is measured."""
    record, terms = analysis.record, records(analysis.theory)
    known = [(cell.series, row) for cell, row in zip(record.cells, terms, strict=True) if row["delta"] is not None]
    above = [series for series in record.series if base_of(series, record.series) != series]
    of_rows = (series for series in above for _ in (*record.batch_sizes, None))  # the order of `term_ratio_rows`
    ratios = zip(of_rows, records(analysis.term_ratios), strict=True)
    compared = [(series, row) for series, row in ratios if row["pairs"]]
    if not known and not compared:
        return ""
    lines = ["theory (Lee et al. 2021, Section 4; bounds for SGD): terms of the K* trials, predicted and measured"]
    if known:
        lines += aligned(_term_row(series, row) for series, row in known)
    if len(known) < len(terms):
        lines.append(f"  no K* trial with measured terms in {len(terms) - len(known)} of {len(terms)} cells")
    if compared:
        base = f"ratios to S={min(record.sparsities):g}, geometric means over the points measured at both"
        lines += ["", f"{base}; predicted c1 = Delta x beta x L"]
        lines += aligned(_ratio_row(series, row) for series, row in compared)
        lines += [sentence(series, row) for series, row in compared if row["batch_size"] is None]
    return "\n".join(lines) + "\n"


def sentence(series: Series, row: Row) -> str:
    """Which way each term moves c1, from the row of all batch sizes of a series (`term_ratio_rows`)."""
    moves = ", ".join(
        f"{name} {times(row[key])} ({_direction(row[key])})"
        for key, name in (("delta", "Delta"), ("beta", "beta"), ("lipschitz", "L"))
    )
    measured = [f"c1 {times(row['c1'])}"] if row["c1"] is not None else []
    if row["k_star"] is not None:
        measured.append(f"K* {times(row['k_star_low'])} to {times(row['k_star_high'])}")
    words = f"; measured {', '.join(measured)}" if measured else "; no K* at both to compare"
    return f"  {series}: {moves}: predicted c1 {times(row['predicted_c1'])}{words}"


def _direction(ratio: float) -> str:
    if abs(math.log(ratio)) <= math.log(NO_CHANGE):
        return "no change"
    return "rises: more steps" if ratio > 1 else "falls: fewer steps"


def _term_row(series: Series, row: Row) -> dict[str, str]:
    terms = {name: significant(row[key]) for key, name in _TERMS.items()}
    laws = {name: three_digits(row[key]) for key, name in _LAWS.items()}
    return {"B": str(row["batch_size"]), **short_columns(series), **terms, **laws, "K*": k_star_text(row)}


def _ratio_row(series: Series, row: Row) -> dict[str, str]:
    batch_size = "all" if row["batch_size"] is None else str(row["batch_size"])
    ratios = {name: times(row[key]) for key, name in _RATIOS.items()}
    return {"B": batch_size, **short_columns(series), "pairs": str(row["pairs"]), **ratios}
