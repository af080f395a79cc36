"""Analysis: all that is computed from the record of a study, each part once, when it is first asked
for."""

from __future__ import annotations

from functools import cached_property

import pandas as pd

from lit_dps.analysis.answer import Steps, answer_rows, expected_steps
from lit_dps.analysis.best_of_n import draw_rows
from lit_dps.analysis.budgets import budget_rows, quality_rows
from lit_dps.analysis.critical import Critical, critical_batch_sizes, critical_rows
from lit_dps.analysis.delay import DelayLaw, delay_laws, delay_rows, doubling_rows
from lit_dps.analysis.gradient_noise import noise_rows
from lit_dps.analysis.law_bootstrap import (
    REPLICATES,
    Scaling,
    bootstrap_law,
    bootstrap_median_law,
    law_rows,
)
from lit_dps.analysis.local_sgd import Curve, curves, with_communications
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.rate_rules import price_rows
from lit_dps.analysis.rates import RateCurve, RateLaw, rate_curves, rate_laws, rate_rows
from lit_dps.analysis.repeats import RepeatSummary, repeat_rows, seeds_of, summarize_repeats
from lit_dps.analysis.sparse_ratios import Ratio, ratio_bounds, ratios
from lit_dps.analysis.step_seconds import StepSeconds, step_seconds
from lit_dps.analysis.summary import CellSummary, cell_rows, summarize, trial_rows
from lit_dps.analysis.term_comparisons import term_ratio_rows
from lit_dps.analysis.theory import theory_rows
from lit_dps.core.progress_line import with_progress
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series


class Analysis:
    """What a study shows, finished or not; what has finished counts.

    Args:
        record: The study.
        replicates: Resamples that the intervals rest on.
        whole: The study at its own goal, where `record` is it at another: its trials took their
            seconds to that.
        validate_every: Steps between two validations in the user's own training; None leaves
            validation out.
    """

    def __init__(
        self,
        record: StudyRecord,
        replicates: int = REPLICATES,
        whole: StudyRecord | None = None,
        validate_every: int | None = None,
    ):
        self.record = record
        self.replicates = replicates
        self.whole = whole or record
        self.validate_every = validate_every

    def at_goal(self, error: float) -> Analysis:
        """The study as it would have ended under a higher goal error (`at_goal`)."""
        return Analysis(
            at_goal(self.record, error), self.replicates, self.whole, self.validate_every
        )

    @cached_property
    def at_each_goal(self) -> list[Analysis]:
        """The study at its own goal, then at each of its further ones."""
        return [self, *map(self.at_goal, self.record.goals)]

    @cached_property
    def cells(self) -> list[CellSummary]:
        """A summary of each cell of the grid, by series, then batch size."""
        return summarize(self.record)

    @cached_property
    def by_cell(self) -> dict[Cell, CellSummary]:
        return {summary.cell: summary for summary in self.cells}

    @cached_property
    def scalings(self) -> dict[Series, Scaling]:
        """The scaling law of each series."""
        steps: dict[Series, dict[int, list[int | None]]] = {
            series: {} for series in self.record.series
        }
        for summary in self.cells:
            if not summary.sooner:  # whose K* is a bound that `scale` does not know of
                steps[summary.cell.series][summary.cell.batch_size] = summary.steps
        interval, seeds = self.record.goal.check_interval, seeds_of(self.repeats)
        found = {}
        for series in with_progress("laws fitted", list(steps)):
            name = self.name_of(series)
            found[series] = bootstrap_law(
                steps[series], self.replicates, 0, interval, seeds.get(series), name
            )
        return found

    @cached_property
    def median_scalings(self) -> dict[Series, Scaling]:
        """The law of the median over seeds of each series that has repeats."""
        interval = self.record.goal.check_interval
        found = seeds_of(self.repeats).items()
        return {
            series: bootstrap_median_law(
                seeds, interval, self.replicates, name=self.name_of(series)
            )
            for series, seeds in found
        }

    def name_of(self, series: Series) -> str:
        """What the repeats of a series are resampled by: others of this study, or of another, go
        their own way."""
        return f"{self.record.name} | {series}"

    @cached_property
    def draws(self) -> pd.DataFrame:
        """A row a cell and n: what the best of n of its trials is (`draws.draw_rows`)."""
        return draw_rows(self.record, self.cells)

    @cached_property
    def repeats(self) -> list[RepeatSummary]:
        """The repeats of each cell's best points (`repeats.summarize_repeats`)."""
        return summarize_repeats(self.record, self.cells, self.whole)

    @cached_property
    def seeds(self) -> pd.DataFrame:
        """A row a repeated point (`repeats.repeat_rows`)."""
        return repeat_rows(self.record, self.repeats)

    @cached_property
    def step_seconds(self) -> dict[Cell, StepSeconds]:
        """Seconds of a training step of each cell for which they are known
        (`step_seconds.step_seconds`)."""
        return step_seconds(self.whole)

    @cached_property
    def expected_steps(self) -> dict[Cell, Steps]:
        """Steps to the goal as the answer takes them, by the law where it serves
        (`expected.expected_steps`)."""
        return expected_steps(self.record, self.cells, self.repeats)

    @cached_property
    def answer(self) -> pd.DataFrame:
        """A row a cell that has a K*: examples and time to the goal on this machine
        (`answer.answer_rows`)."""
        return answer_rows(self.cells, self.step_seconds, self.expected_steps, self.validate_every)

    @cached_property
    def rate_laws(self) -> dict[Series, RateLaw | None]:
        """How the best learning rate of each series goes with the batch size
        (`best_rates.rate_laws`)."""
        return rate_laws(self.record, self.rate_curves)

    @cached_property
    def ratios(self) -> list[Ratio]:
        """K* of sparse over dense cells."""
        return ratios(self.cells, seeds_of(self.repeats), self.replicates)

    @cached_property
    def ratio_bounds(self) -> list[Cell]:
        """The cells whose ratio is left out, as it would only be a bound."""
        return ratio_bounds(self.cells)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row a finished trial (`summary.trial_rows`)."""
        return trial_rows(self.record, self.cells)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row a cell (`summary.cell_rows`)."""
        return with_communications(self.record, self.cells, cell_rows(self.record, self.cells))

    @cached_property
    def laws(self) -> pd.DataFrame:
        """A row a series (`scaling.law_rows`)."""
        return law_rows(self.scalings)

    @cached_property
    def delay_laws(self) -> list[DelayLaw]:
        """The law of batch size and delay of each series that has delays (`delay.delay_laws`)."""
        return delay_laws(self.cells, self.record.goal.check_interval, self.replicates)

    @cached_property
    def delays(self) -> pd.DataFrame:
        """A row a series and delay (`delay.delay_rows`)."""
        return delay_rows(self.delay_laws, self.scalings)

    @cached_property
    def critical_delays(self) -> pd.DataFrame:
        """A row a series and batch size: the delay that doubles K* (`delay.doubling_rows`)."""
        return doubling_rows(self.delay_laws)

    @cached_property
    def local_curves(self) -> list[Curve]:
        """K* against the local steps of a round, of each series and batch size (`local.curves`)."""
        return curves(self.record, self.cells)

    @cached_property
    def budgets(self) -> pd.DataFrame:
        """A row a cell and budget of steps or examples: the best metric within it
        (`budgets.budget_rows`)."""
        return budget_rows(self.record, self.cells)

    @cached_property
    def critical_batch_sizes(self) -> dict[Series, dict[str, Critical]]:
        """By series and definition (`critical`)."""
        interval, seeds = self.record.goal.check_interval, seeds_of(self.repeats)
        return critical_batch_sizes(self.cells, self.scalings, seeds, interval, self.replicates)

    @cached_property
    def critical(self) -> pd.DataFrame:
        """A row a series and definition (`critical.critical_rows`)."""
        return critical_rows(self.critical_batch_sizes)

    @cached_property
    def noise_laws(self) -> pd.DataFrame:
        """A row a cell and a row a trial whose noise was measured (`gradient_noise.noise_rows`)."""
        return noise_rows(self.record)

    @cached_property
    def quality(self) -> pd.DataFrame:
        """A row a cell: the best metric at the whole budget, and its spread
        (`quality.quality_rows`)."""
        return quality_rows(self.record, self.cells)

    @cached_property
    def rate_curves(self) -> list[RateCurve]:
        """The best learning rates of each series (`best_rates.rate_curves`)."""
        return rate_curves(self.record, self.cells, self.replicates)

    @cached_property
    def rates(self) -> pd.DataFrame:
        """A row a cell: the best learning rate, and those of the scaling rules
        (`best_rates.rate_rows`)."""
        return rate_rows(self.record, self.rate_curves)

    @cached_property
    def prices(self) -> pd.DataFrame:
        """A row a cell, kind of rate and scaling rule: what the rule costs in steps
        (`prices.price_rows`)."""
        return price_rows(self.record, self.rate_curves)

    @cached_property
    def theory(self) -> pd.DataFrame:
        """A row a cell: the terms of the theory and what it predicts from them
        (`theory.theory_rows`)."""
        return theory_rows(self.cells, self.scalings)

    @cached_property
    def term_ratios(self) -> pd.DataFrame:
        """A row a series above the smallest sparsity and batch size (`term_ratio_rows`)."""
        return term_ratio_rows(self.record, self.scalings)
