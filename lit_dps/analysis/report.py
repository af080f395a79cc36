"""The report of a study as text for the terminal. The same records give the same text."""

from __future__ import annotations

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.scaling import estimate
from lit_dps.analysis.series import short_columns
from lit_dps.analysis.tables import aligned, k_star_text, records, significant
from lit_dps.analysis.theory_text import theory_text
from lit_dps.space import Range, short_names

SELDOM = ("outraced", "stopped", "failed", "pending")  # counts that are told where there are any


def render(analysis: Analysis) -> str:
    """The report: the table, a line of the scaling law per series, the theory, notes."""
    noted = "".join(f"note: {line}\n" for line in analysis.notes)
    return "\n".join(part for part in (table_and_law(analysis), theory_text(analysis), noted) if part)


def table_and_law(analysis: Analysis) -> str:
    """The head of the report: what the study is, the table, a line of the scaling law per series."""
    record, goal = analysis.record, analysis.record.goal
    lines = [
        f"study {record.name}: workload {record.workload}, {record.trials} trials a cell, {goal} "
        f"checked every {goal.check_interval} steps, budget {goal.max_steps} steps",
        "",
        *_table(analysis),
        "",
        "K* = c1 / B + c2, robust fit of log K*, 95 % bootstrap intervals over trials",
    ]
    for series, scaling in sorted(analysis.scalings.items()):
        parts = [scaling.describe()]
        if scaling.fit is not None:
            c1, c2 = estimate(scaling.fit.c1, scaling.c1), estimate(scaling.fit.c2, scaling.c2)
            parts = [f"c1 = {c1}", f"c2 = {c2}", *parts]
        lines.append(f"  {series}  " + "  ".join(parts))
    return "\n".join(lines) + "\n"


def value_text(value: float | int | None, box: Range) -> str:
    """A metaparameter for reading: 3 significant digits, of 1 - value on a reverse_log scale: 0.9990 is not 0.9999."""
    if value is None or not box.integer and box.scale != "reverse_log":
        return significant(value)
    if box.integer:
        return str(value)
    exponent = int(f"{1 - value:.2e}".partition("e")[2])
    return f"{value:.{max(2 - exponent, 0)}f}"


def _table(analysis: Analysis) -> list[str]:
    record, table, names = analysis.record, analysis.table, short_names(list(analysis.record.space))
    counts = ["complete", "incomplete", "infeasible", *(name for name in SELDOM if table[name].any())]
    return aligned(
        (
            {
                "B": str(cell.batch_size),
                **short_columns(cell.series),
                "K*": k_star_text(row),
                **{name: str(row[name]) for name in counts},
                **{f"best {name}": value_text(row[name], record.space[key]) for key, name in names.items()},
                "on the boundary": row["boundary"] or "-",
            }
            for cell, row in zip(record.cells, records(table), strict=True)
        ),
        words=True,
    )
