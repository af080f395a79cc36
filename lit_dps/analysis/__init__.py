"""What the results of a study show: the scaling law, ratios, theory, report and figures. No torch, no database.

`Analysis` is the way in; `lit_dps.analysis.figures`, which needs matplotlib, draws it.
"""

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import answer_rows, seconds_text, timing_notes
from lit_dps.analysis.expected import observed
from lit_dps.analysis.fit import AT_LEAST, AT_MOST, LOSS_SCALE, Fit, fit_many, fit_scaling, overhead_batch_size
from lit_dps.analysis.goals import at_goal
from lit_dps.analysis.law import Law, law_of
from lit_dps.analysis.local import communications
from lit_dps.analysis.no_result import NO_RESULT, ended_without_result
from lit_dps.analysis.notebook import Study
from lit_dps.analysis.notes import observed_notes
from lit_dps.analysis.observations import Observation, medians
from lit_dps.analysis.publishing import figures_folder, goal_folder, listing, publish, source_of, write_all, write_goals
from lit_dps.analysis.rates import RateLaw, adaptive_advice, rate_law
from lit_dps.analysis.refusal import OFF
from lit_dps.analysis.report import parts_of, render, sentence, table_and_law, theory_text
from lit_dps.analysis.scaling import (
    NEGLIGIBLE,
    PERCENTILES,
    REPLICATES,
    Interval,
    Scaling,
    estimate,
    resample,
    scale,
)
from lit_dps.analysis.seeds import median_draws, scale_medians, seeds_of
from lit_dps.analysis.sparse_ratios import Ratio
from lit_dps.analysis.step_seconds import StepSeconds, step_seconds
from lit_dps.analysis.summary import at_first_check, comparable, setting, summarize
from lit_dps.analysis.tables import cell_of, frame, records, significant, three_digits, value_text, write_csv
from lit_dps.analysis.term_ratios import (
    RATIOS,
    Pair,
    lipschitz_at_the_same_steps,
    measured_terms,
    paired_terms,
)
from lit_dps.analysis.theory import Start, Terms, start_of, terms_of
