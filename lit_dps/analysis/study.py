"""Study: what a notebook works with, data frames and figures of one study."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.report import render
from lit_dps.errors import ConfigError
from lit_dps.record import StudyRecord


class Study:
    """A study, finished or not, as a notebook reads it.

    Args:
        record: What is stored of it.

    Attributes:
        analysis: All that is computed from it.
    """

    def __init__(self, record: StudyRecord):
        self.analysis = Analysis(record)

    def __repr__(self) -> str:
        record = self.analysis.record
        return f"Study({record.name!r}: {len(record.cells)} cells, {len(self.trials)} finished trials)"

    def at_goal(self, error: float) -> Study:
        """The study as it would have ended under a higher goal error."""
        return Study(self.analysis.at_goal(error).record)

    @property
    def trials(self) -> pd.DataFrame:
        """A row a finished trial: its cell, how it ended, its metaparameters (`summary.trial_rows`)."""
        return self.analysis.trials

    @property
    def cells(self) -> pd.DataFrame:
        """A row a cell: K*, how its trials ended, and the best metaparameters (`summary.cell_rows`)."""
        return self.analysis.table

    @property
    def law(self) -> pd.DataFrame:
        """A row a series: c1, c2 and b_crit of K* = c1 / B + c2, each with its 95 % limits (`scaling.law_rows`)."""
        return self.analysis.laws

    @property
    def report(self) -> str:
        """What `lit-dps analyze` prints of it."""
        return render(self.analysis)

    def plot(self, name: str = "scaling") -> Any:
        """A figure of the study by its name: scaling, metaparameters, lipschitz, logs or ratios.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ConfigError: for another name, or where the study has nothing to draw yet.
        """
        from lit_dps.analysis.figures import FIGURES, drawn

        figures = {figure.NAME: figure for figure in FIGURES}
        if name not in figures:
            raise ConfigError("name", name, f"any of {', '.join(figures)}")
        if (reason := figures[name].missing(self.analysis)) is not None:
            raise ConfigError("name", name, f"a figure that this study has data for: {reason}")
        return drawn(figures[name], self.analysis)
