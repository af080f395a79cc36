"""Analysis: numbers from a `StudyRecord`. No torch, no database.

How trials become a number, in the order of reading:

1. `summary`: the trials of a cell -> K*, the fewest steps to the goal.
2. `repeats`: the best points on fresh seeds -> the median K over seeds.
3. `observations`: K* or the median -> K with its noise, or a bound of K.
4. `law_fit`: observations -> c1 and c2 of K = c1 / B + c2 by a robust fit; draws of c1 and c2, and
   the law's error -> intervals. `law_verdict`: which answers can be trusted.
5. `law`: `fit_law` joins these in a `Law`, which predicts K; `law_tables` are its tables. With one
   or two K it rests on a prior of B_crit (`critical_prior`).
6. `critical`: B_crit by other definitions. `answer`: K by the law x `step_seconds` -> time.

`Analysis` is the index of these and all other tables: it computes each one once, when it is first
used. The other modules can be read alone: `rates`, `rate_rules` and
`adam_rules` (learning rates), `ramps` (batches that grow), `theory` and
`term_comparisons`, `budgets`, `sparse_ratios`, `best_of_n`, `delay`, `local_sgd`, `layers`,
`scale_up` (K at a larger size), `fixed_data`, `training_curves`, `gradient_noise`, `other_goals`.
`tables` and `intervals` are tools.

This room imports `lit_dps.core` only; `lit_dps.report` prints and draws its results. The names
below are for other rooms and for users' scripts; `lit_dps.replication` uses no others.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_dps.analysis.analysis import Analysis as Analysis
    from lit_dps.analysis.critical import DEFINITIONS as DEFINITIONS
    from lit_dps.analysis.fixed_data import fixed_data_losses as fixed_data_losses
    from lit_dps.analysis.intervals import PERCENTILES as PERCENTILES
    from lit_dps.analysis.intervals import REPLICATES as REPLICATES
    from lit_dps.analysis.intervals import Interval as Interval
    from lit_dps.analysis.intervals import estimate as estimate
    from lit_dps.analysis.intervals import resampling_rng as resampling_rng
    from lit_dps.analysis.law import Law as Law
    from lit_dps.analysis.law_fit import data_of as data_of
    from lit_dps.analysis.law_verdict import MAX_MISFIT as MAX_MISFIT
    from lit_dps.analysis.observations import noise_of_search as noise_of_search
    from lit_dps.analysis.rates import RATE_NAMES as RATE_NAMES
    from lit_dps.analysis.scale_up import ScaleUp as ScaleUp
    from lit_dps.analysis.scale_up import fit_scale_up as fit_scale_up
    from lit_dps.analysis.tables import cell_of as cell_of
    from lit_dps.analysis.tables import significant as significant
    from lit_dps.analysis.tables import three_digits as three_digits
    from lit_dps.analysis.term_comparisons import Pair as Pair
    from lit_dps.analysis.term_comparisons import (
        lipschitz_at_the_same_steps as lipschitz_at_the_same_steps,
    )
    from lit_dps.analysis.term_comparisons import measured_terms as measured_terms
    from lit_dps.analysis.term_comparisons import paired_terms as paired_terms
    from lit_dps.analysis.term_comparisons import readings_to_goal as readings_to_goal
    from lit_dps.analysis.theory import start_of as start_of
    from lit_dps.analysis.theory import terms_of as terms_of

# Public names by the module that has them. They are imported when they are first used, so that a
# table formatter does not wait for SciPy.
_PUBLIC = {
    "Analysis": "analysis",
    "DEFINITIONS": "critical",
    "MAX_MISFIT": "law_verdict",
    "fixed_data_losses": "fixed_data",
    "PERCENTILES": "intervals",
    "REPLICATES": "intervals",
    "Interval": "intervals",
    "Law": "law",
    "estimate": "intervals",
    "resampling_rng": "intervals",
    "noise_of_search": "observations",
    "RATE_NAMES": "rates",
    "ScaleUp": "scale_up",
    "fit_scale_up": "scale_up",
    "cell_of": "tables",
    "data_of": "law_fit",
    "significant": "tables",
    "three_digits": "tables",
    "Pair": "term_comparisons",
    "lipschitz_at_the_same_steps": "term_comparisons",
    "measured_terms": "term_comparisons",
    "paired_terms": "term_comparisons",
    "readings_to_goal": "term_comparisons",
    "start_of": "theory",
    "terms_of": "theory",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
