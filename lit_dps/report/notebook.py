"""`Study`: a study as a notebook reads it, in data frames and figures."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.errors import ConfigError
from lit_dps.core.record import StudyRecord
from lit_dps.report.text import answered


class Study:
    """A study, finished or not, as a notebook reads it: data frames and figures.

    Args:
        record: What is stored of it.
        analysis: What is computed from that, if it is already.

    Attributes:
        analysis: All that is computed from it.
    """

    def __init__(self, record: StudyRecord, analysis: Analysis | None = None):
        self.analysis = analysis or Analysis(record)

    def __repr__(self) -> str:
        record = self.analysis.record
        return (
            f"Study({record.name!r}: {len(record.cells)} cells, {len(self.trials)} finished trials)"
        )

    def at_goal(self, error: float) -> Study:
        """The study as it would have ended under a higher goal error."""
        further = self.analysis.at_goal(error)
        return Study(further.record, further)

    @property
    def trials(self) -> pd.DataFrame:
        """A row a finished trial: its cell, how it ended, its metaparameters
        (`summary.trial_rows`)."""
        return self.analysis.trials

    @property
    def cells(self) -> pd.DataFrame:
        """A row a cell: K*, how its trials ended, and the best metaparameters
        (`summary.cell_rows`)."""
        return self.analysis.table

    @property
    def law(self) -> pd.DataFrame:
        """A row a series: c1, c2 and b_crit of K* = c1 / B + c2, each with its 95 % limits
        (`scaling.law_rows`)."""
        return self.analysis.laws

    @property
    def budgets(self) -> pd.DataFrame:
        """The best metric within budgets of steps and of examples (`budgets.budget_rows`)."""
        return self.analysis.budgets

    @property
    def quality(self) -> pd.DataFrame:
        """The best metric of each cell at the whole budget, with its spread
        (`quality.quality_rows`)."""
        return self.analysis.quality

    @property
    def rates(self) -> pd.DataFrame:
        """The best learning rate and effective rate of each cell, beside scaling rules
        (`best_rates.rate_rows`)."""
        return self.analysis.rates

    @property
    def prices(self) -> pd.DataFrame:
        """What the scaling rules for the rate cost in steps (`prices.price_rows`)."""
        return self.analysis.prices

    @property
    def draws(self) -> pd.DataFrame:
        """A row a cell and n: the best of n of its trials (`draws.draw_rows`)."""
        return self.analysis.draws

    @property
    def repeats(self) -> pd.DataFrame:
        """A row a repeated point: the median K over fresh seeds and its spread
        (`repeats.repeat_rows`)."""
        return self.analysis.seeds

    @property
    def answer(self) -> pd.DataFrame:
        """A row a cell that has a K*: examples and time to the goal, the fastest marked
        (`answer.answer_rows`)."""
        return self.analysis.answer

    @property
    def critical(self) -> pd.DataFrame:
        """A row a series and definition of the critical batch size, each with its 95 % limits
        (`critical`)."""
        return self.analysis.critical

    @property
    def report(self) -> str:
        """What `lit-dps analyze` prints of it."""
        return answered(self.analysis)

    def plot(self, name: str = "scaling") -> Any:
        """A figure of the study, a `matplotlib.figure.Figure`, by its name: "scaling", "rates",
        "budgets", ...

        Raises:
            ConfigError: for another name, or where the study has nothing to draw yet.
        """
        from lit_dps.report.figures import (
            FIGURES,
            drawn,
        )  # matplotlib, only where something is drawn

        figures = {figure.NAME: figure for figure in FIGURES}
        if name not in figures:
            raise ConfigError("name", name, f"any of {', '.join(figures)}")
        if (reason := figures[name].missing(self.analysis)) is not None:
            raise ConfigError("name", name, f"a figure that this study has data for: {reason}")
        return drawn(figures[name], self.analysis)
