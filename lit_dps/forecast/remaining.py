"""What is left to run of a study: trials and repeats, their optimizer steps and checks, and passes
of pruning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lit_dps.core.racing import best_steps
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan, missing_repeats
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.study.progress import Ratio, mean_of_nearest_batch_size, ratio_one

Points = Mapping[Cell, Collection[int]]  # the points to run of each cell


@dataclass(frozen=True)
class Work:
    """Trials, their optimizer steps and their checks of the entire validation split; expected ones
    are no integers."""

    trials: int = 0
    steps: float = 0
    checks: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.trials + other.trials, self.steps + other.steps, self.checks + other.checks
        )


def work(
    trials: Mapping[Cell, int], steps: Mapping[Cell, float], check_interval: int
) -> dict[Cell, Work]:
    """The work of so many trials of each cell, at so many steps a trial."""
    return {
        cell: Work(n, n * steps[cell], n * steps[cell] / check_interval)
        for cell, n in trials.items()
    }


def at_most(points: Points, max_steps: int, check_interval: int) -> dict[Cell, Work]:
    """The work of each cell if every trial spends its budget."""
    return work(_counted(points), dict.fromkeys(points, max_steps), check_interval)


def expected(
    points: Points,
    results: Mapping[Cell, Sequence[TrialResult]],
    check_interval: int,
    along: Ratio = ratio_one,
) -> dict[Cell, Work] | None:
    """The work of each cell at the mean steps of the finished trials, however they ended, of the
    nearest batch size.

    None without finished trials: nothing else tells.

    Args:
        points: What is to run.
        results: What has finished.
        check_interval: Of the goal.
        along: Steps of a cell over those of its series at the nearest batch size, by the law
            (`likely.along_laws`).
    """
    mean = mean_of_nearest_batch_size(_steps_run(results), points, along)
    return None if mean is None else work(_counted(points), mean, check_interval)


def not_above(likely: Mapping[Cell, Work], most: Mapping[Cell, Work]) -> dict[Cell, Work]:
    """What is expected of each cell, but no more than what is possible at most."""
    return {
        cell: w
        if w.steps <= most[cell].steps
        else Work(w.trials, most[cell].steps, most[cell].checks)
        for cell, w in likely.items()
    }


def repeats_at_most(
    plan: RepeatPlan,
    points: Points,
    record: StudyRecord | None,
    max_steps: int,
    check_interval: int,
) -> dict[Cell, Work]:
    """The work of each cell's repeats if none of them meets the goal.

    Where trials are left the best points may yet be others, so that all of the plan is ahead; to
    the budget where there is no K* yet. A cell whose trials are done without a K* has nothing to
    repeat.

    Args:
        plan: What is repeated.
        points: The trials that are left, of every cell.
        record: What is stored of the study, if anything is.
        max_steps, check_interval: Of the goal.
    """
    trials, steps = {}, {}
    for cell, left in points.items():
        k_star = (
            None if record is None else best_steps(r.steps for r in record.results.get(cell, ()))
        )
        trials[cell] = plan.count * plan.points if left else _repeats_left(plan, cell, record)
        steps[cell] = max_steps if k_star is None else min(plan.limit(k_star), max_steps)
    return work(trials, steps, check_interval)


def repeats_expected(
    plan: RepeatPlan,
    points: Points,
    record: StudyRecord | None,
    check_interval: int,
    along: Ratio = ratio_one,
) -> dict[Cell, Work] | None:
    """The work of each cell's repeats, where its best points stay the best.

    At the mean steps of finished repeats of the nearest batch size; without any at the mean K*
    there; without that at the mean of finished trials; each along the law, as of `expected`. None
    without any of these.
    """
    if record is None:
        return None
    best = {cell: best_steps(r.steps for r in results) for cell, results in record.results.items()}
    known = (
        _steps_run(record.repeats),
        {c: [k] for c, k in best.items() if k},
        _steps_run(record.results),
    )
    means = (mean_of_nearest_batch_size(steps, points, along) for steps in known)
    mean = next((m for m in means if m is not None), None)
    if mean is None:
        return None
    trials = {
        cell: _repeats_left(plan, cell, record)
        if best.get(cell) or not left
        else plan.count * plan.points
        for cell, left in points.items()
    }
    return work(trials, mean, check_interval)


def pruning_passes(points: Points, workers: int, reused: bool) -> dict[int, int]:
    """Passes of pruning by batch size, at most: one for each sparse trial.

    Reused, the scores of a point are computed once by each worker; those passes know no batch size
    and stand under the smallest one.
    """
    sparse = [
        (cell.batch_size, point)
        for cell, left in points.items()
        if cell.sparsity > 0
        for point in left
    ]
    passes = Counter(batch_size for batch_size, _ in sparse)
    if reused and sparse:
        return {min(passes): min(workers * len({point for _, point in sparse}), len(sparse))}
    return dict(passes)


def passes_of_repeats(repeats: Mapping[Cell, Work]) -> dict[int, int]:
    """Passes of pruning by batch size, one for each sparse repeat: its network is its own."""
    passes: Counter[int] = Counter()
    for cell, each in repeats.items():
        passes[cell.batch_size] += each.trials * (cell.sparsity > 0)
    return {batch_size: n for batch_size, n in passes.items() if n}


def _counted(points: Points) -> dict[Cell, int]:
    return {cell: len(left) for cell, left in points.items()}


def _steps_run(results: Mapping[Cell, Sequence[TrialResult]]) -> dict[Cell, list[float]]:
    return {
        cell: [r.steps_run for r in ended if r.status is not Status.FAILED]
        for cell, ended in results.items()
    }


def _repeats_left(plan: RepeatPlan, cell: Cell, record: StudyRecord | None) -> int:
    if record is None:
        return 0
    return len(missing_repeats(plan, record.results.get(cell, ()), record.repeats.get(cell, ())))
