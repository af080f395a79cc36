"""The table of a study, as text for the terminal and as rows for CSV. The same records give the same text."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_dps.analysis.observations import observed_notes
from lit_dps.analysis.scaling import Scaling, estimate, scaling_of
from lit_dps.analysis.summary import summarize
from lit_dps.analysis.text import Row, aligned, k_star_text, significant
from lit_dps.analysis.theory_report import theory_text
from lit_dps.files import replacing
from lit_dps.record import StudyRecord
from lit_dps.space import Range, short_names


def table_rows(record: StudyRecord) -> list[Row]:
    """One row a cell, by sparsity, then batch size; values in full, None where there is none.

    Columns: batch_size [examples], sparsity, k_star [steps], floor (1 where K* is at the first check, an upper bound,
    else 0), complete, incomplete, infeasible, outraced, stopped, failed, pending, point and the metaparameters (short
    names) of the K* trial, boundary ("learning_rate high; momentum low" or empty).
    """
    names = short_names(list(record.space))
    rows = []
    for cell in summarize(record):
        params = {} if cell.best is None else cell.best.trial.params
        rows.append(
            {
                "batch_size": cell.cell.batch_size,
                "sparsity": cell.cell.sparsity,
                "k_star": cell.k_star,
                "floor": int(cell.at_first_check),
                "complete": cell.complete,
                "incomplete": cell.incomplete,
                "infeasible": cell.infeasible,
                "outraced": cell.outraced,
                "stopped": cell.stopped,
                "failed": cell.failed,
                "pending": cell.pending,
                "point": None if cell.best is None else cell.best.trial.point,
                **{name: params.get(key) for key, name in names.items()},
                "boundary": "; ".join(f"{names[key]} {end}" for key, end in cell.boundary.items()),
            }
        )
    return rows


def fit_rows(scalings: Mapping[float, Scaling]) -> list[Row]:
    """One row a sparsity: c1 [examples], c2 [steps] and b_crit [examples], each with its 95 % limits, and a verdict.

    `batch_sizes` is the number of those that the law is fitted to.
    """
    rows = []
    for sparsity, scaling in sorted(scalings.items()):
        row: Row = {"sparsity": sparsity, "batch_sizes": len(scaling.resolved)}
        fit = scaling.fit
        values = (None,) * 3 if fit is None else (fit.c1, fit.c2, fit.critical_batch_size)
        intervals = (scaling.c1, scaling.c2, scaling.critical)
        for name, value, interval in zip(("c1", "c2", "b_crit"), values, intervals, strict=True):
            low, high = (None, None) if interval is None else interval
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {"identifiable": scaling.identifiable, "verdict": scaling.describe()})
    return rows


def notes(record: StudyRecord) -> list[str]:
    """What a reader should know before trusting the table, a line each.

    What is missing, K* that are upper bounds, what was observed of the trials, boxes that look too small.
    """
    cells, names = summarize(record), short_names(list(record.space))
    lines = []
    missing = [cell for cell in cells if cell.best is None]
    if len(missing) == len(cells):
        lines.append("no complete trial in any cell yet: no K* and no fit to draw")
    elif missing:
        lines.append(f"no complete trial in {len(missing)} of {len(cells)} cells: no K* there")
    pending, running = sum(cell.pending for cell in cells), sum(cell.running for cell in cells)
    if pending:
        declared = record.trials * len(cells)
        lines.append(f"{pending} of {declared} trials have not finished ({running} running or queued)")
    if bounds := sum(cell.at_first_check for cell in cells):
        lines.append(
            f"K* is at the first check in {bounds} of {len(cells)} cells: an upper bound, left out of the law; lower "
            "goal.check_interval to resolve it"
        )
    lines += observed_notes(record)
    ends = Counter((key, end) for cell in cells for key, end in cell.boundary.items())
    for (key, end), count in sorted(ends.items()):
        where = f"on the {end} end of its range in {count} of {len(cells)} cells"
        lines.append(f"the best {names[key]} lies {where}: widen it")
    return lines


def render(record: StudyRecord, scalings: Mapping[float, Scaling] | None = None) -> str:
    """The report of a study as text: the table, a line of the scaling law per sparsity, the theory, notes.

    Args:
        record: The study, finished or not.
        scalings: Its scaling laws if they are known already.
    """
    scalings = scaling_of(record) if scalings is None else scalings
    noted = "".join(f"note: {line}\n" for line in notes(record))
    return "\n".join(part for part in (table_and_law(record, scalings), theory_text(record, scalings), noted) if part)


def table_and_law(record: StudyRecord, scalings: Mapping[float, Scaling]) -> str:
    """The head of the report: what the study is, the table, a line of the scaling law per sparsity."""
    goal = record.goal
    lines = [
        f"study {record.name}: workload {record.workload}, {record.trials} trials a cell, goal error {goal.error:g} "
        f"checked every {goal.check_interval} steps, budget {goal.max_steps} steps",
        "",
        *_table(record),
        "",
        "K* = c1 / B + c2, robust fit of log K*, 95 % bootstrap intervals over trials",
    ]
    for sparsity, scaling in sorted(scalings.items()):
        parts = [scaling.describe()]
        if scaling.fit is not None:
            c1, c2 = estimate(scaling.fit.c1, scaling.c1), estimate(scaling.fit.c2, scaling.c2)
            parts = [f"c1 = {c1}", f"c2 = {c2}", *parts]
        lines.append(f"  S={sparsity:g}  " + "  ".join(parts))
    return "\n".join(lines) + "\n"


def write_csv(rows: Sequence[Row], path: Path, columns: Sequence[str] = ()) -> None:
    """Writes rows, all with the same columns, as CSV, None as an empty field, replacing `path` in one go.

    Without rows there is a header of `columns` only.
    """
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def value_text(value: float | int | None, box: Range) -> str:
    """A metaparameter for reading: 3 significant digits, of 1 - value on a reverse_log scale: 0.9990 is not 0.9999."""
    if value is None:
        return "-"
    if box.integer:
        return str(value)
    if box.scale == "reverse_log":
        exponent = int(f"{1 - value:.2e}".partition("e")[2])
        return f"{value:.{max(2 - exponent, 0)}f}"
    return significant(value)


def _table(record: StudyRecord) -> list[str]:
    rows, names = table_rows(record), short_names(list(record.space))
    seldom = (x for x in ("outraced", "stopped", "failed", "pending") if any(row[x] for row in rows))
    counts = ["complete", "incomplete", "infeasible", *seldom]
    body = []
    for row in rows:
        params = {name: value_text(row[name], record.space[key]) for key, name in names.items()}
        body.append(
            {
                "B": str(row["batch_size"]),
                "S": f"{row['sparsity']:g}",
                "K*": k_star_text(row),
                **{name: str(row[name]) for name in counts},
                **{f"best {name}": text for name, text in params.items()},
                "on the boundary": row["boundary"] or "-",
            }
        )
    return aligned(body, words=True)
