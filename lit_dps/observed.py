"""What was observed while a trial ran that a reader of its table should know: names of counts, and notes of them.

A count is kept with the trial (`TrialResult.observed`) wherever it is not the plain case, so most trials keep none.
"""

from __future__ import annotations

SHORT_STEPS = "short_steps"  # optimizer steps on fewer examples than the batch size
UNSCORED = "kept_with_score_0"  # kept elements whose pruning score is 0: kept by their place, not by the pruner
KEPT = "kept"  # kept elements, where there are unscored ones
PRUNABLE = "prunable"  # elements that the pruner chose among, where they are fewer than half of those trained
TRAINED = "trained"  # elements of the parameters that an optimizer trains, where PRUNABLE is told
COPIES = "copies"  # elements of tensors that were masked as copies of pruned parameters
STACKED = "stacked"  # 1 where the trial was trained stacked with others
RANKS = "ranks"  # processes that trained it together, where more than one
