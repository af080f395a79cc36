"""A cell as a study with racing runs it, read back as its trials really went."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from contextlib import redirect_stdout

import optuna

from benchmarks.paper_cost import evenly
from lit_dps.core.racing import longest_attempt
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Trial, TrialResult
from lit_dps.storage.schema import POINT_ATTR, RESULT_ATTR, cell_study_name, decode_result
from lit_dps.study.run import run_study
from lit_dps.study.setup import StudySetup


def run_raced(setup: StudySetup, cell: Cell) -> tuple[float, list[TrialResult]]:
    """Runs a study of one cell.

    Returns:
        Wall seconds of the whole study, and its trials by point, each as its longest attempt. A
        table tells how trials stood at slack x K*; these have all that was run.
    """
    begin = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        if run_study(setup):
            raise KeyboardInterrupt
    wall = time.perf_counter() - begin
    found: dict[int, TrialResult] = {}
    name = cell_study_name(setup.study.name, cell)
    for trial in optuna.load_study(study_name=name, storage=setup.storage.optuna_url).trials:
        if RESULT_ATTR in trial.user_attrs:
            point = trial.user_attrs[POINT_ATTR]
            asked = Trial(cell, point, trial.params, setup.study.seed)
            attempt = decode_result(trial.user_attrs[RESULT_ATTR], asked)
            found[point] = longest_attempt(found.get(point), attempt)
    return wall, [found[point] for point in sorted(found)]


def short_sample(results: Sequence[TrialResult], count: int) -> list[TrialResult]:
    """The K* trial, and others that ran at most twice as long, evenly spread over the points."""
    if not count:
        return []
    k_star = MINIMUM.k_star(result.steps for result in results)
    best = [result for result in results if k_star is not None and result.steps == k_star][:1]
    longest = 2 * (k_star or min(result.steps_run for result in results))
    others = [result for result in results if result.steps_run <= longest and result not in best]
    return best + evenly(others, count - len(best))
