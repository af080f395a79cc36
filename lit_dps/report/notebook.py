"""`Study`: a study in a notebook, as data frames and figures."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.errors import ConfigError
from lit_dps.core.record import StudyRecord, check_is_record
from lit_dps.report.document import study_document
from lit_dps.report.screen import screen
from lit_dps.report.text import all_notes, table_and_law, theory_text


class Study:
    """A study in a notebook, finished or not: data frames and figures.

    Args:
        record: The stored study.
        analysis: Its analysis, if there is one.

    Attributes:
        analysis: All results that are computed from the record.
    """

    def __init__(self, record: StudyRecord, analysis: Analysis | None = None):
        check_is_record(record, "Study")
        self.analysis = analysis or Analysis(record)

    def __repr__(self) -> str:
        record = self.analysis.record
        return (
            f"Study({record.name!r}: {len(record.cells)} cells, {len(self.trials)} finished trials)"
        )

    def at_goal(self, error: float) -> Study:
        """Return the study as it would have ended at an easier goal."""
        further = self.analysis.at_goal(error)
        return Study(further.record, further)

    def with_statistic(self, name: str) -> Study:
        """Return the study as if K* had been another statistic of the same trials.

        Args:
            name: As in `study.statistic`.

        Raises:
            ConfigError: if racing stopped trials that decide it.
        """
        other = self.analysis.with_statistic(name)
        return Study(other.record, other)

    @property
    def trials(self) -> pd.DataFrame:
        """One row per finished trial: cell, status, metaparameters (`summary.trial_rows`)."""
        return self.analysis.trials

    @property
    def cells(self) -> pd.DataFrame:
        """One row per cell: K*, counts of trials, best metaparameters (`summary.cell_rows`)."""
        return self.analysis.table

    @property
    def curves(self) -> pd.DataFrame:
        """One row per trial and step that was checked or read (`readings.curve_rows`).

        In a study with repeats, the trials of the search have `repeat` 0.
        """
        return self.analysis.trial_curves

    @property
    def law(self) -> pd.DataFrame:
        """One row per series: c1, c2 and b_crit of K* = c1 / B + c2 (`law_tables.law_rows`).

        Each value has its 95 % interval.
        """
        return self.analysis.law_table

    @property
    def budgets(self) -> pd.DataFrame:
        """The best metric within numbers of steps and of examples (`budgets.budget_rows`)."""
        return self.analysis.budgets

    @property
    def quality(self) -> pd.DataFrame:
        """The best metric of each cell within the budget (`budgets.quality_rows`)."""
        return self.analysis.quality

    @property
    def rates(self) -> pd.DataFrame:
        """The best learning rates of each cell, and scaling rules (`rates.rate_rows`)."""
        return self.analysis.rates

    @property
    def prices(self) -> pd.DataFrame:
        """What scaling rules for the rate cost in steps (`rate_rules.price_rows`)."""
        return self.analysis.prices

    @property
    def adam_rules(self) -> pd.DataFrame:
        """What not tuning Adam again costs at each batch size (`adam_rules.adam_rule_rows`)."""
        return self.analysis.adam_rules

    @property
    def ramps(self) -> pd.DataFrame:
        """One row per cell whose batch grows: what that saves (`ramps.ramp_rows`)."""
        return self.analysis.ramps

    @property
    def draws(self) -> pd.DataFrame:
        """One row per cell and n: the best of n of its trials (`best_of_n.draw_rows`)."""
        return self.analysis.best_of_n_table

    @property
    def repeats(self) -> pd.DataFrame:
        """One row per repeated point: the median K over fresh seeds (`repeats.repeat_rows`)."""
        return self.analysis.repeat_table

    @property
    def answer(self) -> pd.DataFrame:
        """One row per cell with a K*: examples and time to the goal (`answer.answer_rows`)."""
        return self.analysis.answer

    @property
    def critical(self) -> pd.DataFrame:
        """One row per series and definition of the critical batch size (`critical`)."""
        return self.analysis.critical_table

    @property
    def report(self) -> str:
        """The last screen of a study, as `lit-dps analyze` prints it."""
        return screen(self.analysis)

    @property
    def table_and_law(self) -> str:
        """The head of the report: the protocol, the table of cells, one line per law."""
        return table_and_law(self.analysis)

    @property
    def theory(self) -> str:
        """The measured terms of the theory as text; empty without them."""
        return theory_text(self.analysis)

    @property
    def notes(self) -> list[str]:
        """What to know before you trust the table and the times, one line each."""
        return all_notes(self.analysis)

    def to_dict(self, report: str | None = None) -> dict[str, Any]:
        """Return the study as plain values for strict JSON: what `--json` prints (`Document`).

        Args:
            report: Path of the report page, for the field `report`.
        """
        return study_document(self.analysis, self.notes, report).to_dict()

    def plot(self, name: str = "scaling", style: str = "report", width: float | None = None) -> Any:
        """Return a figure of the study by its name, such as "scaling", "rates" or "budgets".

        Args:
            name: The name of a figure of the package, or the name of your module with a figure.
            style: "report", "paper" or "slides", as `lit-dps figures --style`.
            width: The width in inches, in place of the width of the style.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ConfigError: for an unknown name, style or width, or if the study has no data for the
                figure.
        """
        from lit_dps.report.figures import FIGURES, drawn, of_others  # imports matplotlib
        from lit_dps.report.figures.page_size import PageSize, page_size

        figures = {figure.NAME: figure for figure in FIGURES}
        figure = figures[name] if name in figures else of_others(name, "name")
        reason = figure.missing(self.analysis)
        if reason is not None:
            raise ConfigError("name", name, f"a figure that this study has data for: {reason}")
        with page_size(PageSize(style, width)):
            return drawn(figure, self.analysis)
