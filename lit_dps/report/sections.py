"""Sections of a report on critical batch sizes, delayed gradients and local SGD, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lit_dps.analysis.critical import DEFINITIONS, Critical
from lit_dps.analysis.delay import DelayLaw, misfit_of
from lit_dps.analysis.intervals import estimate
from lit_dps.analysis.local_sgd import FLAT, LocalCurve
from lit_dps.analysis.tables import Row, aligned, k_star_text, short_columns, three_digits
from lit_dps.core.trial import Series

FOOTNOTE = (
    "* below the smallest batch size, counted from a batch size beyond linear scaling, of one "
    "trial, or without limits: critical.csv has the reason"
)


def critical_text(table: Mapping[Series, Mapping[str, Critical]]) -> str:
    """Return the section of a report, a line per series; empty for fewer than two definitions.

    Definitions without a value or bound in any series are omitted.
    """
    shown = []
    for name in DEFINITIONS:
        if any(str(definitions[name]) != "-" for definitions in table.values()):
            shown.append(name)
    if len(shown) < 2:
        return ""
    rows = []
    has_footnote = False
    for series, definitions in table.items():
        row = short_columns(series)
        for name in shown:
            critical = definitions[name]
            row[DEFINITIONS[name]] = str(critical)
            if critical.value is not None and critical.note:
                has_footnote = True
        rows.append(row)
    lines = ["critical batch sizes in examples, by definition", *aligned(rows)]
    if has_footnote:
        lines.append(FOOTNOTE)
    return "\n".join(lines) + "\n"


def delay_text(laws: Iterable[DelayLaw]) -> str:
    """Return the section of a report on delayed gradients; empty without a fitted law."""
    lines = []
    table = []
    for law in laws:
        if law.fit is not None:
            lines.append(f"  {law.series}  {_delay_law_text(law)}")
            table += [_delay_row_text(law, delay) for delay in law.separate]
    if not lines:
        return ""
    return "\n".join(
        [
            "K* = c1 / B + c2 / sin(pi / (2 (2 tau + 1))), joint fit of all delays tau",
            *lines,
            "",
            "separate fit of each delay, and its c1 and c2 as the joint fit predicts them",
            *aligned(table),
            "",
        ]
    )


def _delay_law_text(law: DelayLaw) -> str:
    """Return the constants of a law and its critical delays in words."""
    delays = []
    for batch_size in dict.fromkeys((law.batch_sizes[0], law.batch_sizes[-1])):
        delays.append(f"{estimate(*law.critical_delay(batch_size))} at B={batch_size}")
    constants = f"c1 = {three_digits(law.fitted.c1)}  c2 = {three_digits(law.fitted.c2)}"
    return f"{constants}  misfit {law.misfit:.0%}  K* doubles at delay {' and '.join(delays)}"


def _delay_row_text(law: DelayLaw, delay: int) -> dict[str, str]:
    """Return the separate law of a delay beside the joint law as text, by heading."""
    separate = law.separate[delay]
    joint = law.predicted(delay)
    c1 = "-"
    c2 = "-"
    misfit = "-"
    if separate.fit is not None:
        c1 = estimate(separate.fit.c1, separate.c1)
        c2 = estimate(separate.fit.c2, separate.c2)
        misfit = f"{misfit_of(separate.fit, separate.exact_k):.0%}"
    joint_misfit = "-"
    if separate.exact_k:
        joint_misfit = f"{misfit_of(joint, separate.exact_k):.0%}"
    return {
        **short_columns(law.series),
        "delay": str(delay),
        "separate c1": c1,
        "joint c1": three_digits(joint.c1),
        "separate c2": c2,
        "joint c2": three_digits(joint.c2),
        "separate misfit": misfit,
        "joint misfit": joint_misfit,
    }


def local_text(curves: Sequence[LocalCurve]) -> str:
    """Return the section of a report on local SGD, a line per curve; empty without curves."""
    if not curves:
        return ""
    flat = f"at most {FLAT:g} x K* at the least H, or one check above it"
    lines = [f"local SGD: K* against H (flat: {flat})"]
    for curve in curves:
        lines.append(f"  {curve.series}  B={curve.batch_size}  {curve.describe()}")
    return "\n".join(lines) + "\n"


def communications_text(row: Row) -> dict[str, str]:
    """Return the column communications of a row as text; empty if the table has none."""
    if "communications" not in row:
        return {}
    return {"communications": k_star_text({**row, "k_star": row["communications"]})}
