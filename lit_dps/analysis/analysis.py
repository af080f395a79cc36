"""The index of the analysis: each table of a study, computed once, when it is first used."""

from __future__ import annotations

from functools import cached_property

import pandas as pd

from lit_dps.analysis.adam_rules import adam_rule_rows
from lit_dps.analysis.answer import MIN_SEEDS, ExpectedSteps, answer_rows, expected_steps
from lit_dps.analysis.best_of_n import draw_rows
from lit_dps.analysis.budgets import budget_rows, quality_rows
from lit_dps.analysis.critical import Critical, critical_batch_sizes, critical_rows
from lit_dps.analysis.delay import (
    DelayLaw,
    critical_delay_rows,
    delay_laws,
    delay_points,
    delay_rows,
)
from lit_dps.analysis.gradient_noise import NoiseLaw, noise_laws, reading_rows
from lit_dps.analysis.intervals import REPLICATES
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_tables import law_rows, series_curves
from lit_dps.analysis.local_sgd import LocalCurve, local_curves, local_rows, with_communications
from lit_dps.analysis.observations import (
    Observation,
    noise_of_search,
    observations_of_cells,
    observations_of_repeats,
)
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.ramps import point_rows, ramp_rows
from lit_dps.analysis.rate_rules import price_rows
from lit_dps.analysis.rates import RateCurve, RateLaw, rate_curves, rate_laws, rate_rows
from lit_dps.analysis.readings import curve_rows
from lit_dps.analysis.repeats import RepeatSummary, repeat_rows, summarize_repeats
from lit_dps.analysis.sparse_ratios import Ratio, ratio_bounds, ratios
from lit_dps.analysis.step_seconds import StepSeconds, step_seconds
from lit_dps.analysis.summary import CellSummary, by_series, cell_rows, summarize, trial_rows
from lit_dps.analysis.tables import Row, records
from lit_dps.analysis.term_comparisons import term_ratio_rows
from lit_dps.analysis.theory import theory_rows
from lit_dps.analysis.training_curves import best_trial_curves, lipschitz_means, lipschitz_rows
from lit_dps.core.batch_schedule import GROWING
from lit_dps.core.progress_line import with_progress
from lit_dps.core.record import StudyRecord, check_is_record
from lit_dps.core.trial import Cell, Series


class Analysis:
    """The results of a study, finished or not; only finished trials count.

    Args:
        record: The study.
        replicates: Resamples or draws of each interval.
        original: The study at the goal it was run with, if `record` is at another goal. The
            seconds of its trials are up to this goal.
        validate_every: Steps between two validations in the user's training; None for no
            validation.
    """

    def __init__(
        self,
        record: StudyRecord,
        replicates: int = REPLICATES,
        original: StudyRecord | None = None,
        validate_every: int | None = None,
    ):
        check_is_record(record, "Analysis")
        self.record = record
        self.replicates = replicates
        self.original = original or record
        self.validate_every = validate_every

    def at_goal(self, error: float) -> Analysis:
        """Return the study as it would have ended at another goal (`other_goals.at_goal`)."""
        return Analysis(
            at_goal(self.record, error), self.replicates, self.original, self.validate_every
        )

    def with_statistic(self, name: str) -> Analysis:
        """Return the study as if K* had been another statistic (`StudyRecord.with_statistic`)."""
        record = self.record.with_statistic(name)
        return Analysis(record, self.replicates, self.original, self.validate_every)

    @cached_property
    def at_each_goal(self) -> list[Analysis]:
        """The study at its goal, then at each of its further goals."""
        return [self, *map(self.at_goal, self.record.goals)]

    # Cells and trials

    @cached_property
    def cells(self) -> list[CellSummary]:
        """K* of each cell and how its trials ended, by series, then batch size (`summary`)."""
        return summarize(self.record)

    @cached_property
    def cells_by_series(self) -> dict[Series, list[CellSummary]]:
        """`cells`, by series."""
        return by_series(self.cells)

    @cached_property
    def by_cell(self) -> dict[Cell, CellSummary]:
        """`cells`, by cell."""
        return {summary.cell: summary for summary in self.cells}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a cell: K*, its metaparameters, how its trials ended (`summary.cell_rows`)."""
        return with_communications(self.record, self.cells, cell_rows(self.record, self.cells))

    @cached_property
    def trials(self) -> pd.DataFrame:
        """One row a finished trial (`summary.trial_rows`)."""
        return trial_rows(self.record, self.cells)

    @cached_property
    def trial_curves(self) -> pd.DataFrame:
        """One row a trial and step that was checked or read (`readings.curve_rows`)."""
        return curve_rows(self.record)

    @cached_property
    def best_of_n_table(self) -> pd.DataFrame:
        """One row a cell and n: the best of n of its trials (`best_of_n.draw_rows`)."""
        return draw_rows(self.record, self.cells)

    # The law of batch size

    @cached_property
    def laws(self) -> dict[Series, Law]:
        """The law of K* of each series (`law.fit_law`)."""
        laws = {}
        for series in with_progress("laws fitted", self.record.series):
            observations = observations_of_cells(self.record, self.cells_by_series[series])
            laws[series] = self._law_of(series, observations)
        return laws

    def _law_of(
        self, series: Series, observations: list[Observation], uses_medians: bool = False
    ) -> Law:
        """Return the law of a series. Batch sizes that change along a trial have none."""
        why_inapplicable = ""
        if not self.record.batch_schedule(series).is_constant:
            why_inapplicable = f"{GROWING}, so B is not its batch size"
        unit = self.record.goal.cost_unit
        return fit_law(
            observations,
            uses_medians=uses_medians,
            unit=unit,
            why_inapplicable=why_inapplicable,
        )

    @cached_property
    def median_laws(self) -> dict[Series, Law]:
        """The law of the median over seeds of each series that has repeats."""
        laws = {}
        for series in self.repeats_with_median:
            laws[series] = self.law(series, over_seeds=True, search_noise=self.search_noise)
        return laws

    @property
    def search_noise(self) -> float:
        """Standard deviation of log K* between searches, of the cell with the fewest trials."""
        counts = [len(cell.trials) for cell in self.cells if cell.trials]
        fewest = min(counts, default=self.record.trials)
        return noise_of_search(fewest, len(self.record.space))

    def law(self, series: Series, over_seeds: bool = False, search_noise: float = 0.0) -> Law:
        """Return the law of a series, with intervals.

        Args:
            series: The series.
            over_seeds: The law of the medians over seeds instead of K*; the series has repeats.
            search_noise: Standard deviation of log K* between searches of other points, which
                widens the intervals of the medians.
        """
        if not over_seeds:
            return self.laws[series]
        repeats = [each for each in self.repeats if each.cell.series == series]
        observations = observations_of_repeats(repeats, search_noise)
        return self._law_of(series, observations, uses_medians=True)

    def is_repeated(self, series: Series, min_seeds: int) -> bool:
        """Return True if each K* of a series was repeated on at least `min_seeds` seeds."""
        if series not in self.median_laws:
            return False
        medians = self.median_laws[series].k_star
        if medians.keys() != self.laws[series].k_star.keys():
            return False
        repeats = self.repeats_with_median[series]
        return all(len(each.results) >= min_seeds for each in repeats)

    def name_of(self, series: Series) -> str:
        """Return the name that seeds draws of a series in comparisons of several studies.

        Draws of other series and studies are independent (`Observation.draws`).
        """
        return f"{self.record.name} | {series.stored_name}"

    @cached_property
    def law_table(self) -> pd.DataFrame:
        """One row a series: c1, c2 and B_crit with intervals (`law_tables.law_rows`)."""
        return law_rows(self.laws)

    @cached_property
    def law_curves(self) -> pd.DataFrame:
        """K* and the law of each series as points of a curve (`law_tables.series_curves`)."""
        return series_curves(self.laws, self.median_laws, self.record.batch_sizes)

    @cached_property
    def critical_batch_sizes(self) -> dict[Series, dict[str, Critical]]:
        """Critical batch sizes, by series and definition (`critical`)."""
        noise = self.record.noise
        return critical_batch_sizes(self.cells, self.laws, self.replicates, noise)

    @cached_property
    def critical_table(self) -> pd.DataFrame:
        """One row a series and definition of the critical batch size (`critical.critical_rows`)."""
        return critical_rows(self.critical_batch_sizes)

    @cached_property
    def ratios(self) -> list[Ratio]:
        """K* of sparse over dense cells (`sparse_ratios`)."""
        return ratios(self.cells, self.laws, self.replicates)

    @cached_property
    def ratio_bounds(self) -> list[Cell]:
        """The cells that have no ratio, because it would only be a bound (`sparse_ratios`)."""
        return ratio_bounds(self.cells, self.laws)

    # Repeats on fresh seeds

    @cached_property
    def repeats(self) -> list[RepeatSummary]:
        """The repeats of each cell's best points (`repeats.summarize_repeats`)."""
        return summarize_repeats(self.record, self.cells, self.original)

    @cached_property
    def repeats_of_k_star(self) -> dict[Cell, RepeatSummary]:
        """The repeats of the point of K* of each cell that has some."""
        return {each.cell: each for each in self.repeats if each.rank == 1}

    @cached_property
    def repeats_with_median(self) -> dict[Series, list[RepeatSummary]]:
        """The repeats of each K* point whose median over seeds is finite, by series."""
        by_series: dict[Series, list[RepeatSummary]] = {}
        for each in self.repeats_of_k_star.values():
            if each.finite_median is not None:
                by_series.setdefault(each.cell.series, []).append(each)
        return by_series

    @cached_property
    def repeat_table(self) -> pd.DataFrame:
        """One row a repeated point: quantiles over seeds and the bias (`repeats.repeat_rows`)."""
        return repeat_rows(self.record, self.repeats)

    # The answer: time to the goal

    @cached_property
    def step_seconds(self) -> dict[Cell, StepSeconds]:
        """Seconds of a training step of each cell, where known (`step_seconds`)."""
        return step_seconds(self.record, self.original)

    @cached_property
    def expected_steps(self) -> dict[Cell, ExpectedSteps]:
        """Steps to the goal of the answer, by the law if it describes K (`answer`).

        K* is the best of many trials, so a single run usually needs more steps. A series uses
        medians over seeds if each K* has `MIN_SEEDS` repeats.
        """
        return expected_steps(self.record, self.cells, self.laws_of_answer, self.repeats_of_k_star)

    @cached_property
    def laws_of_answer(self) -> dict[Series, Law]:
        """The law of each series that the answer uses: of medians over seeds, else of K*."""
        laws = dict(self.laws)
        for series in laws:
            if self.is_repeated(series, MIN_SEEDS):
                laws[series] = self.median_laws[series]
        return laws

    @cached_property
    def answer(self) -> pd.DataFrame:
        """One row a cell that has a K*: examples and time to the goal (`answer.answer_rows`)."""
        return answer_rows(
            self.record, self.cells, self.step_seconds, self.expected_steps, self.validate_every
        )

    @cached_property
    def answers(self) -> dict[Cell, Row]:
        """The row of `answer` of each cell that has a K*."""
        cells = [summary.cell for summary in self.cells if summary.k_star is not None]
        return dict(zip(cells, records(self.answer), strict=True))

    @cached_property
    def ramps(self) -> pd.DataFrame:
        """One row a cell whose batch grows: what it saves (`ramps.ramp_rows`)."""
        return ramp_rows(self.record, self.cells, self.repeats_of_k_star)

    @cached_property
    def ramp_points(self) -> pd.DataFrame:
        """One row a cell: its steps and examples, growing batch or not (`ramps.point_rows`)."""
        return point_rows(self.record, self.cells, self.repeats_of_k_star)

    # Learning rates

    @cached_property
    def rate_curves(self) -> list[RateCurve]:
        """The best learning rates of each series (`rates.rate_curves`)."""
        return rate_curves(self.record, self.cells, self.replicates)

    @cached_property
    def rate_laws(self) -> dict[Series, RateLaw | None]:
        """The power law of the best learning rate of each series (`rates.rate_laws`)."""
        return rate_laws(self.record, self.rate_curves)

    @cached_property
    def rates(self) -> pd.DataFrame:
        """One row a cell: the best learning rate, and rates by rules (`rates.rate_rows`)."""
        return rate_rows(self.record, self.rate_curves)

    @cached_property
    def prices(self) -> pd.DataFrame:
        """One row a cell, kind of rate and rule: its cost in steps (`rate_rules.price_rows`)."""
        return price_rows(self.record, self.rate_curves)

    @cached_property
    def adam_rules(self) -> pd.DataFrame:
        """One row a cell and rule: the cost of not tuning Adam (`adam_rules.adam_rule_rows`)."""
        return adam_rule_rows(self.record, self.cells)

    # Theory

    @cached_property
    def theory(self) -> pd.DataFrame:
        """One row a cell: the terms of the theory and its prediction (`theory.theory_rows`)."""
        return theory_rows(self.cells, self.laws)

    @cached_property
    def term_ratios(self) -> pd.DataFrame:
        """One row a sparse series and batch size: terms over dense ones (`term_comparisons`)."""
        return term_ratio_rows(self.record, self.laws)

    @cached_property
    def noise_readings(self) -> pd.DataFrame:
        """One row a measurement of the gradient noise (`gradient_noise.reading_rows`)."""
        return reading_rows(self.record)

    @cached_property
    def noise_law_of_series(self) -> dict[Series, NoiseLaw]:
        """The line through the gradient noise of each series (`gradient_noise`)."""
        return noise_laws(self.record)

    # Curves, delay and local SGD

    @cached_property
    def best_trial_curves(self) -> pd.DataFrame:
        """One row a validation of a K* trial (`training_curves.best_trial_curves`)."""
        return best_trial_curves(self.cells, self.record.goal.metric)

    @cached_property
    def lipschitz(self) -> pd.DataFrame:
        """One row a measurement of the Lipschitz constant (`training_curves.lipschitz_rows`)."""
        return lipschitz_rows(self.record)

    @cached_property
    def lipschitz_means(self) -> pd.DataFrame:
        """Means of `lipschitz` over trials, at each step (`training_curves.lipschitz_means`)."""
        return lipschitz_means(self.lipschitz)

    @cached_property
    def budgets(self) -> pd.DataFrame:
        """One row a cell and budget of steps or examples: the best metric (`budgets`)."""
        return budget_rows(self.record, self.cells)

    @cached_property
    def quality(self) -> pd.DataFrame:
        """One row a cell: the best metric at the whole budget (`budgets.quality_rows`)."""
        return quality_rows(self.record, self.cells)

    @cached_property
    def delay_laws(self) -> list[DelayLaw]:
        """The joint law of batch size and delay of each series (`delay.delay_laws`)."""
        laws = {}
        for series, law in self.laws.items():
            if self.record.batch_schedule(series).is_constant:
                laws[series] = law
        return delay_laws(laws)

    @cached_property
    def delays(self) -> pd.DataFrame:
        """One row a series and delay: joint and separate law (`delay.delay_rows`)."""
        return delay_rows(self.delay_laws)

    @cached_property
    def delay_points(self) -> pd.DataFrame:
        """One row a cell with K*, beside the joint law (`delay.delay_points`)."""
        return delay_points(self.delay_laws)

    @cached_property
    def critical_delays(self) -> pd.DataFrame:
        """One row a series and batch size: the delay that doubles K* (`delay`)."""
        return critical_delay_rows(self.delay_laws)

    @cached_property
    def local_curves(self) -> list[LocalCurve]:
        """K* against the local steps of a round, by series and batch size (`local_sgd`)."""
        return local_curves(self.record, self.cells)

    @cached_property
    def local_points(self) -> pd.DataFrame:
        """One row a cell with K* of local SGD (`local_sgd.local_rows`)."""
        return local_rows(self.local_curves)
