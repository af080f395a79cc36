"""The last screen of a study: what to train with, one table, the law, and the worst warnings.

Everything else is printed on request (`lit_dps.report.text.SECTIONS`) and is in the report page.
"""

from __future__ import annotations

from collections.abc import Collection

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import MEDIAN
from lit_dps.analysis.intervals import estimate
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_verdict import Refusal
from lit_dps.core.text import WIDTH, wrap
from lit_dps.core.trial import Series
from lit_dps.report.answer import recommendation
from lit_dps.report.no_result import is_without_k_star, no_result_lines, no_result_table
from lit_dps.report.notes import warnings_of
from lit_dps.report.result_table import result_table
from lit_dps.report.text import FILES, NOTES, SECTIONS, requested, sections
from lit_dps.report.timing_notes import TIMING, timing_notes
from lit_dps.report.warnings import NOTES as STUDY_NOTES
from lit_dps.report.warnings import study_notes

MAX_WARNINGS = 3
# Otherwise the screen of two series of five batch sizes would have more than 25 lines.
MAX_WARNING_LINES = 4


def screen(study: Analysis, show: Collection[str] = (), width: int = WIDTH) -> str:
    """Return the last screen of a study at one goal, and the sections that `--show` names.

    Args:
        study: The study.
        show: Names of `SECTIONS`.
        width: Columns of the terminal.
    """
    parts = [answer_part(study, width), result_part(study, width), closing_part(study, width)]
    texts = ["\n".join(lines) + "\n" for lines in parts]
    return "\n".join([*texts, *requested(study, show)])


def more_line(study: Analysis, show: Collection[str], width: int) -> str:
    """Return what `--show` adds to the screen, with the number of further notes."""
    names = []
    for name in sections(study, SECTIONS.keys() - show):
        if name != NOTES:
            names.append(name)
            continue
        notes = len(study_notes(study)) + len(timing_notes(study))
        more = notes - len(shown_warnings(study, width))
        if more > 0:
            names.append(f"{NOTES} ({more} more)")
    if FILES not in show:
        names.append(FILES)
    if not names:
        return ""
    return "\n".join(wrap(f"more by --show: {', '.join(names)}", width)) + "\n"


def answer_part(study: Analysis, width: int) -> list[str]:
    """Return the recommendation, a line a series; without any K*, what to change in the study."""
    lines = []
    if is_without_k_star(study.cells):
        for text in no_result_lines(study.record, study.cells):
            lines += wrap(text, width)
        return lines
    for series in study.record.series:
        lines += wrap(f"{prefix(study, series)}{recommendation(study, series)}", width)
    return lines


def prefix(study: Analysis, series: Series) -> str:
    """Return the name of a series before its line; empty if the study has one series."""
    if len(study.record.series) == 1:
        return ""
    return f"{series}: "


def result_part(study: Analysis, width: int) -> list[str]:
    """Return the protocol in a line, and the table of results, or of best values without any K*."""
    lines = wrap(protocol_line(study), width)
    if is_without_k_star(study.cells):
        return [*lines, *no_result_table(study.record.goal, study.cells)]
    return [*lines, *result_table(study, width)]


def protocol_line(study: Analysis) -> str:
    """Return the name and goal of a study, and how to read its numbers."""
    record = study.record
    text = f"study {record.name}, {record.goal}."
    if not record.statistic.is_minimum:
        return f"{text} K* is {record.statistic.describe_in(record.goal.cost_unit)}."
    if any(row["steps_of"] == MEDIAN for row in study.answers.values()):
        return f"{text} K* is the best of {record.trials} trials. Times: medians over seeds."
    if study.answers and record.trials > 1:
        return f"{text} K* is the best of {record.trials} trials; one run usually needs more."
    return text


def closing_part(study: Analysis, width: int) -> list[str]:
    """Return the law, a line a series, and the warnings."""
    lines = []
    for series, law in sorted(study.laws.items()):
        lines += wrap(f"{prefix(study, series)}{law_text(law)}", width)
    for warning in shown_warnings(study, width):
        lines += wrap(f"warning: {warning}", width)
    return lines


def law_text(law: Law) -> str:
    """Return the law of a series with 95 % intervals, or why it is refused, in one line."""
    if law.fit is None or law.verdict.refusal >= Refusal.EXTRAPOLATION:
        return f"No law: {law.describe()}"
    formula = law.unit.law
    for name, text in (
        ("c1", estimate(law.fit.c1, law.c1)),
        ("c2", estimate(law.fit.c2, law.c2)),
    ):
        formula = formula.replace(name, text)
    reason = law.describe() if law.is_b_crit_known else str(law.verdict)
    return f"K* = {formula}; {reason}"


def shown_warnings(study: Analysis, width: int) -> list[str]:
    """Return the most harmful warnings, as many as the screen has room for; at least one."""
    shown: list[str] = []
    lines = 0
    for warning in warnings_of([*STUDY_NOTES, *TIMING], study)[:MAX_WARNINGS]:
        lines += len(wrap(f"warning: {warning}", width))
        if shown and lines > MAX_WARNING_LINES:
            break
        shown.append(warning)
    return shown
