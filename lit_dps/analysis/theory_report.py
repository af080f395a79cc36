"""The theory's terms and ratios as text, for the report of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lit_dps.analysis.scaling import Scaling, three_digits
from lit_dps.analysis.text import Row, aligned, k_star_text, significant, times
from lit_dps.analysis.theory import base_of, term_ratio_rows, theory_rows
from lit_dps.record import StudyRecord

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


def theory_text(record: StudyRecord, scalings: Mapping[float, Scaling]) -> str:
    """The section of a report on the theory: terms, ratios, a sentence per sparsity; empty if nothing is measured."""
    rows, ratios = theory_rows(record, scalings), term_ratio_rows(record, scalings)
    known = [row for row in rows if row["delta"] is not None]
    compared = [row for row in ratios if row["pairs"]]
    if not known and not compared:
        return ""
    lines = ["theory (Lee et al. 2021, Section 4; bounds for SGD): terms of the K* trials, predicted and measured"]
    if known:
        lines += aligned([_term_row(row) for row in known])
    if len(known) < len(rows):
        lines.append(f"  no K* trial with measured terms in {len(rows) - len(known)} of {len(rows)} cells")
    if compared:
        base = base_of(record)
        head = (
            f"ratios to S={base:g}, geometric means over the points measured at both; predicted c1 = Delta x beta x L"
        )
        lines += ["", head, *aligned([_ratio_row(row) for row in compared])]
        lines += [sentence(row) for row in compared if row["batch_size"] is None]
    return "\n".join(lines) + "\n"


def sentence(row: Row) -> str:
    """Which way each term moves c1, from the row of all batch sizes of a sparsity (`term_ratio_rows`)."""
    moves = ", ".join(
        f"{name} {times(row[key])} ({_direction(row[key])})"
        for key, name in (("delta", "Delta"), ("beta", "beta"), ("lipschitz", "L"))
    )
    measured = [f"c1 {times(row['c1'])}"] if row["c1"] is not None else []
    if row["k_star"] is not None:
        measured.append(f"K* {times(row['k_star_low'])} to {times(row['k_star_high'])}")
    words = f"; measured {', '.join(measured)}" if measured else "; no K* at both to compare"
    return f"  S={row['sparsity']:g}: {moves}: predicted c1 {times(row['predicted_c1'])}{words}"


def _direction(ratio: float) -> str:
    if abs(math.log(ratio)) <= math.log(NO_CHANGE):
        return "no change"
    return "rises: more steps" if ratio > 1 else "falls: fewer steps"


def _term_row(row: Row) -> dict[str, str]:
    return {
        "B": str(row["batch_size"]),
        "S": f"{row['sparsity']:g}",
        **{name: significant(row[key]) for key, name in _TERMS.items()},
        **{name: "-" if row[key] is None else three_digits(row[key]) for key, name in _LAWS.items()},
        "K*": k_star_text(row),
    }


def _ratio_row(row: Row) -> dict[str, str]:
    return {
        "B": "all" if row["batch_size"] is None else str(row["batch_size"]),
        "S": f"{row['sparsity']:g}",
        "pairs": str(row["pairs"]),
        **{name: times(row[key]) for key, name in _RATIOS.items()},
    }
