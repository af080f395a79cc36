"""The report of a study: text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Collection

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.critical import critical_text
from lit_dps.analysis.delay import delay_text
from lit_dps.analysis.local_sgd import communications_text, local_text
from lit_dps.analysis.repeats import intervals_of, law_lines, luck_text
from lit_dps.analysis.tables import (
    Row,
    aligned,
    base_of,
    k_star_text,
    records,
    short_columns,
    significant,
    three_digits,
    times,
    value_text,
)
from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import Series
from lit_dps.report.answer import answer_text
from lit_dps.report.no_result import no_result_text
from lit_dps.report.warnings import study_notes

# What a report has beside the answer, the table, the law and the notes: told on request, since
# nobody who asks which batch size to take wants 20 lines of it; table.txt has it all
SECTIONS = ("critical", "theory")
FILES = "files"

SELDOM = ("outraced", "stopped", "failed", "pending")  # counts that are told where there are any
NO_CHANGE = 1.1  # a term of the theory within this factor counts as unchanged

# Columns of the two tables of the theory, and what they are called in the report.
_SIZES = {
    "delta": "Delta",
    "lipschitz": "L",
    "beta": "beta",
    "epsilon": "epsilon",
    "rate": "mean rate",
}
_LAWS = {
    "predicted_c1": "predicted c1",
    "c1": "fitted c1",
    "predicted_c2": "predicted c2",
    "c2": "fitted c2",
    "predicted_k_star": "predicted K*",
}
_DRIVERS = {"delta": "Delta", "beta": "beta", "lipschitz": "L"}  # of c1
_RATIOS = {
    **_DRIVERS,
    "epsilon": "epsilon",
    "predicted_c1": "predicted c1",
    "predicted_c1_measured_epsilon": "by epsilon^2",
    "c1": "fitted c1",
    "k_star": "K*",
}


def parts_of(option: str) -> tuple[str, ...]:
    """What `--show` asks for, such as "theory,files", or "all". Raises ConfigError for another
    name."""
    known = (*SECTIONS, FILES)
    names = [name.strip() for name in option.split(",") if name.strip()]
    for name in names:
        if name not in (*known, "all"):
            raise ConfigError(
                "--show", name, f"any of {', '.join(known)}, with commas between, or all"
            )
    return known if "all" in names else tuple(names)


def answered(analysis: Analysis, show: Collection[str] = ()) -> str:
    """What a study ends with: which batch size is the fastest on this machine, then the report.

    Args:
        analysis: The study.
        show: The `SECTIONS` to tell too.
    """
    first = answer_text(
        analysis.record,
        analysis.cells,
        analysis.answer,
        analysis.rate_laws,
        analysis.validate_every,
    )
    if not first:
        first = no_result_text(analysis.record, analysis.cells)
    return "\n".join(part for part in (first, render(analysis, show)) if part)


def render(analysis: Analysis, show: Collection[str] = SECTIONS) -> str:
    """The report of all that is equal on every run: the table, a line of the law per series, notes,
    and `SECTIONS`."""
    noted = "".join(f"note: {line}\n" for line in study_notes(analysis))
    luck = luck_text(analysis.record, analysis.cells, analysis.repeats, analysis.median_scalings)
    more = {name: text for name, text in sections(analysis).items() if name in show}
    of_axes = delay_text(analysis.delay_laws, analysis.delays), local_text(analysis.local_curves)
    parts = (
        table_and_law(analysis),
        luck,
        more.get("critical"),
        *of_axes,
        more.get("theory"),
        noted,
    )
    return "\n".join(part for part in parts if part)


def sections(analysis: Analysis) -> dict[str, str]:
    """The text of each of `SECTIONS` that the study has something to say in."""
    found = {
        "critical": critical_text(analysis.critical_batch_sizes),
        "theory": theory_text(analysis),
    }
    return {name: text for name, text in found.items() if text}


def table_and_law(analysis: Analysis) -> str:
    """The head of the report: what the study is, the table, a line of the scaling law per
    series."""
    record, goal = analysis.record, analysis.record.goal
    lines = [
        f"study {record.name}: workload {record.workload}, {record.trials} trials a cell, {goal} "
        f"checked every {goal.check_interval} steps, budget {goal.max_steps} steps"
        f"{', run on to it' if record.run_on else ''}",
        "",
        *_table(analysis),
        "",
        f"K* = c1 / B + c2, robust fit of log K*, 95 % {intervals_of(analysis.scalings)}",
        *law_lines(analysis.scalings),
    ]
    if record.noise is not None:
        lines.append(f"  {record.noise.sentence}")
    return "\n".join(lines) + "\n"


def _table(analysis: Analysis) -> list[str]:
    record, table, names = analysis.record, analysis.table, short_names(list(analysis.record.space))
    counts = [
        "complete",
        "incomplete",
        "infeasible",
        *(name for name in SELDOM if table[name].any()),
    ]
    return aligned(
        (
            {
                "B": str(cell.batch_size),
                **short_columns(cell.series),
                "K*": k_star_text(row),
                **communications_text(row),
                **{name: str(row[name]) for name in counts},
                **{
                    f"best {name}": value_text(row[name], record.space[key])
                    for key, name in names.items()
                },
                "on the boundary": row["boundary"] or "-",
            }
            for cell, row in zip(record.cells, records(table), strict=True)
        ),
        words=True,
    )


def theory_text(analysis: Analysis) -> str:
    """The section of a report on the theory: terms, ratios, a sentence per series; empty if nothing
    is measured."""
    record, terms = analysis.record, records(analysis.theory)
    known = [
        (cell.series, row)
        for cell, row in zip(record.cells, terms, strict=True)
        if row["delta"] is not None
    ]
    above = [series for series in record.series if base_of(series, record.series) != series]
    of_rows = (
        series for series in above for _ in (*record.batch_sizes, None)
    )  # the order of `term_ratio_rows`
    ratios = zip(of_rows, records(analysis.term_ratios), strict=True)
    compared = [(series, row) for series, row in ratios if row["pairs"]]
    if not known and not compared:
        return ""
    lines = [
        "theory (Lee et al. 2021, Section 4; bounds for SGD): terms of the K* trials, predicted "
        "and measured"
    ]
    if known:
        lines += aligned(_term_row(series, row) for series, row in known)
    if len(known) < len(terms):
        lines.append(
            f"  no K* trial with measured terms in {len(terms) - len(known)} of {len(terms)} cells"
        )
    if compared:
        base = (
            f"ratios to S={min(record.sparsities):g}, geometric means over the points "
            "measured at "
            "both"
        )
        lines += ["", f"{base}; predicted c1 = Delta x beta x L"]
        lines += aligned(_ratio_row(series, row) for series, row in compared)
        lines += [sentence(series, row) for series, row in compared if row["batch_size"] is None]
    return "\n".join(lines) + "\n"


def sentence(series: Series, row: Row) -> str:
    """Which way each term moves c1, from the row of all batch sizes of a series
    (`term_ratio_rows`)."""
    moves = ", ".join(
        f"{name} {times(row[key])} ({_direction(row[key])})" for key, name in _DRIVERS.items()
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
    terms = {name: significant(row[key]) for key, name in _SIZES.items()}
    laws = {name: three_digits(row[key]) for key, name in _LAWS.items()}
    return {
        "B": str(row["batch_size"]),
        **short_columns(series),
        **terms,
        **laws,
        "K*": k_star_text(row),
    }


def _ratio_row(series: Series, row: Row) -> dict[str, str]:
    batch_size = "all" if row["batch_size"] is None else str(row["batch_size"])
    ratios = {name: times(row[key]) for key, name in _RATIOS.items()}
    return {"B": batch_size, **short_columns(series), "pairs": str(row["pairs"]), **ratios}
