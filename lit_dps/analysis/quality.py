"""The best value of the metric at the whole budget against the batch size (Shallue et al. 2019,
"solution quality").

Does a large batch end worse, if it is tuned as well? Two readings: the best of all checks, as if
training had been stopped there, and that of the last check. Both are chosen by the validation split
that they are measured on, over all trials: they flatter, at every batch size alike where the trials
are as many. A budget of steps gives large batches more examples; `budgets` has one of examples
beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from lit_dps.analysis.curves import Seen, best_within
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names

TOP = 5  # the best trials that the spread is over
LATE = 0.9  # a best value that is found after this share of the budget may fall further


def quality_rows(record: StudyRecord, cells: Sequence[CellSummary]) -> pd.DataFrame:
    """One row a cell that has a value of the goal's metric, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], best (of all trials and checks),
    exact (1; 0 where trials stopped before the budget, and the true best is this one or a better
    one), ended_early, the number of those, found_at [steps], late (1 where that is in the last
    tenth of the budget: a longer one may do better), trials, the number that are known to the end,
    top (how many of them the spread is over, at most `TOP`), top_median and top_worst, of the best
    values of these, final (the best value at the last check, of trials that ran to the budget),
    point and the metaparameters (short names) of the best trial, and, where its curve keeps further
    metrics, the training loss of the batch among them, their values where it was best.
    """
    goal, names, rows = record.goal, short_names(list(record.space)), []
    sign = -1 if goal.at_least else 1
    others = sorted(
        {key for s in cells for r in s.trials for key in r.curve} - {"step", "exact", goal.metric}
    )
    for summary in cells:
        seen = [Seen(result, goal) for result in summary.trials]
        if not seen or (best := best_within(seen, goal, goal.max_steps)) is None:
            continue
        whole = [
            of for of in seen if of.until >= goal.max_steps and of.best(goal.max_steps) is not None
        ]
        top = sorted((of.best(goal.max_steps)[0] for of in whole), key=lambda value: sign * value)[
            :TOP
        ]
        final = [
            of.values[-1]
            for of in whole
            if of.steps[-1] == goal.max_steps and math.isfinite(of.values[-1])
        ]
        params, curve = best.result.trial.params, best.result.curve
        at = list(curve["step"]).index(best.step)
        rows.append(
            {
                **columns_of(summary.cell.series),
                "batch_size": summary.cell.batch_size,
                "best": best.value,
                "exact": int(best.exact),
                "ended_early": best.ended,
                "found_at": best.step,
                "late": int(best.step > LATE * goal.max_steps),
                "trials": len(whole),
                "top": len(top),
                "top_median": float(np.median(top)) if top else None,
                "top_worst": top[-1] if top else None,
                "final": min(final, key=lambda value: sign * value, default=None),
                "point": best.result.trial.point,
                **{name: params.get(key) for key, name in names.items()},
                **{key: curve[key][at] if curve.get(key) else None for key in others},
            }
        )
    columns = [
        "batch_size",
        "best",
        "exact",
        "ended_early",
        "found_at",
        "late",
        "trials",
        "top",
        "top_median",
    ]
    columns += ["top_worst", "final", "point", *names.values(), *others]
    return frame(rows, [*columns_of(record.series[0]), *columns])
