"""The last screen of a study: what to train with, one table, the law, and the worst warnings.

Everything else is printed on request (`lit_dps.report.text.SECTIONS`) and is in the report page.
"""

from __future__ import annotations

from collections.abc import Collection

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import estimate
from lit_dps.analysis.law import Law
from lit_dps.core.text import WIDTH, wrap
from lit_dps.core.trial import Series
from lit_dps.report.answer import recommendation, trained_series
from lit_dps.report.no_result import is_without_k_star, no_result_lines, no_result_table
from lit_dps.report.notes import warnings_of
from lit_dps.report.result_table import result_table
from lit_dps.report.text import FILES, NOTES, SECTIONS, requested, sections
from lit_dps.report.timing_notes import TIMING, times_text
from lit_dps.report.warnings import NOTES as STUDY_NOTES

MAX_WARNINGS = 3
# Otherwise the screen of two series of five batch sizes would have more than 25 lines.
MAX_WARNING_LINES = 3


def screen(study: Analysis, show: Collection[str] = (), width: int = WIDTH) -> str:
    """Return the last screen of a study at one goal, and the sections that `--show` names.

    Args:
        study: The study.
        show: Names of `SECTIONS`.
        width: Columns of the terminal.
    """
    parts = [answer_part(study, width), result_part(study, width), closing_part(study, width)]
    texts = ["\n".join(lines) + "\n" for lines in parts]
    texts += [wrapped_prose(text, width) for text in requested(study, show, width)]
    return "\n".join(texts)


def wrapped_prose(text: str, width: int) -> str:
    """Return a section with its long lines wrapped; its tables fit already."""
    lines = []
    for line in text.splitlines():
        if len(line) <= width:
            lines.append(line)
        else:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [f"{indent}{each}" for each in wrap(line.lstrip(), width - len(indent))]
    return "\n".join(lines) + "\n"


def more_line(study: Analysis, show: Collection[str], width: int) -> str:
    """Return a line with what `--show` adds to the screen, and the number of further warnings."""
    names = []
    hidden = len(all_warnings(study)) - len(shown_warnings(study, width))
    for name in sections(study, SECTIONS.keys() - show):
        if name == NOTES and hidden:
            noun = "warning" if hidden == 1 else "warnings"
            name = f"{NOTES} ({hidden} more {noun})"
        names.append(name)
    if FILES not in show:
        names.append(FILES)
    if not names:
        return ""
    return "\n".join(wrap(f"--show also prints: {', '.join(names)}", width)) + "\n"


def answer_part(study: Analysis, width: int) -> list[str]:
    """Return the recommendation, a line a series; without any K*, what to change in the study."""
    lines = []
    if is_without_k_star(study.cells):
        for text in no_result_lines(study.record, study.cells):
            lines += wrap(text, width)
        return lines
    for series in trained_series(study):
        lines += wrap(f"{prefix(study, series)}{recommendation(study, series)}", width)
    return lines


def prefix(study: Analysis, series: Series) -> str:
    """Return the names of a trained series before its line; empty if the study has one series."""
    if len(study.record.series) == 1:
        return ""
    names = map(str, trained_series(study)[series])
    return f"{'; '.join(names)}: "


def result_part(study: Analysis, width: int) -> list[str]:
    """Return the protocol in a line, and the table of results, or of best values without any K*."""
    lines = wrap(protocol_line(study), width)
    if is_without_k_star(study.cells):
        return [*lines, *no_result_table(study.record.goal, study.cells)]
    return [*lines, *result_table(study, width)]


def protocol_line(study: Analysis) -> str:
    """Return the name and goal of a study, and how to read its numbers."""
    record = study.record
    sentences = [f"study {record.name}, {record.goal}.", k_star_meaning(study), times_text(study)]
    return " ".join(filter(None, sentences))


def k_star_meaning(study: Analysis) -> str:
    """Return what K* is, in a sentence; empty if the study has no K* or one trial a cell."""
    record = study.record
    if not record.statistic.is_minimum:
        return f"K* is {record.k_star_words}."
    if not study.answers or record.trials == 1:
        return ""
    trials = f"{record.trials} trials"
    if record.setting("study.best_of") is not None:
        trials = f"{record.trials} seeds of one sample"
    if any(summary.pending for summary in study.cells):
        return f"K* is the best so far of at most {trials}; one run usually needs more."
    return f"K* is the best of {trials}; one run usually needs more."


def closing_part(study: Analysis, width: int) -> list[str]:
    """Return the law, a line a series, and the warnings."""
    lines = []
    for series in trained_series(study):
        text = law_text(study.laws_of_answer[series])
        lines += wrap(f"{prefix(study, series)}{text}", width)
    for warning in shown_warnings(study, width):
        lines += wrap(f"warning: {warning}", width)
    return lines


def law_text(law: Law) -> str:
    """Return the law of a series with 95 % intervals, or why it is refused, in one line."""
    if law.fit is None or not law.describes_k:
        return f"No law: {law.verdict}"
    c1 = estimate(law.fit.c1, law.c1_interval)
    c2 = estimate(law.fit.c2, law.c2_interval)
    formula = law.unit.law.replace("c1", c1).replace("c2", c2)
    # `--show cells` has the advice too, which would take a line for each series here.
    reason = law.describe() if law.is_b_crit_known else law.verdict.reason
    statistic = "median K over seeds" if law.uses_medians else "K*"
    return f"{statistic} = {formula}; {reason}"


def all_warnings(study: Analysis, has_details: bool = False) -> list[str]:
    """Return all warnings of a study, the most harmful first, on request with their details."""
    return warnings_of([*STUDY_NOTES, *TIMING], study, has_details)


def shown_warnings(study: Analysis, width: int) -> list[str]:
    """Return the most harmful warnings, as many as the screen has room for; at least one."""
    shown: list[str] = []
    lines = 0
    for warning in all_warnings(study)[:MAX_WARNINGS]:
        lines += len(wrap(f"warning: {warning}", width))
        if shown and lines > MAX_WARNING_LINES:
            break
        shown.append(warning)
    return shown
