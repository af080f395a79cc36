"""Notes on what happened in the trials of a study: ends, validation, engines, schedules.

Counts are of all finished trials together; "up to" is the largest value of any single trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.trial import (
    RANKS,
    SCHEDULE,
    SHORT_STEPS,
    SPARSE_KERNELS,
    STACKED,
    UNCOUNTED_STEPS,
    WARM_UP,
    Status,
    TrialResult,
)
from lit_dps.report.notes import (
    Note,
    Values,
    count_of,
    count_trials,
    finished_trials,
    first_names,
    percent,
    were,
)

# A goal that is met within this share of the schedule sees almost no decay of the rate.
EARLY_SHARE = 0.1


def failed_trials(study: Analysis) -> Iterator[Values]:
    """Yield the causes of trials that ended with an error, if there are any."""
    failed = _with_status(study, Status.FAILED)
    if not failed:
        return
    causes = []
    for result in failed:
        causes.append(f"{result.trial.cell} sample {result.trial.point}: {first_line(result)}")
    again = "They run again"
    if len(failed) == 1:
        again = "It runs again"
    yield {
        "trials": count_trials(failed),
        "causes": "; ".join(first_names(causes)),
        "again": again,
    }


def stopped_trials(study: Analysis) -> Iterator[Values]:
    """Yield the first reason of trials that their module or a callback ended."""
    stopped = _with_status(study, Status.STOPPED)
    if stopped:
        yield {"trials_were": were(stopped), "reason": first_line(stopped[0])}


def _with_status(study: Analysis, status: Status) -> list[TrialResult]:
    """Return the finished trials of a status."""
    return [result for result in finished_trials(study) if result.status is status]


def diverged_after_goal(study: Analysis) -> Iterator[Values]:
    """Yield runs that were to continue after their goal and diverged before max_steps."""
    yield from _ended_after_goal(study, has_failure=False)


def stopped_after_goal(study: Analysis) -> Iterator[Values]:
    """Yield runs that were to continue after their goal and were stopped before max_steps."""
    yield from _ended_after_goal(study, has_failure=True)


def _ended_after_goal(study: Analysis, has_failure: bool) -> Iterator[Values]:
    """Yield the number of runs that ended between their goal and max_steps, if there are any."""
    if not study.record.train_past_goal:
        return
    ended = []
    for result in _with_status(study, Status.COMPLETE):
        is_short = result.steps_run < study.record.goal.max_steps
        if is_short and bool(result.failure) is has_failure:
            ended.append(result)
    counted = "It counts as complete, with a curve up to there."
    if len(ended) > 1:
        counted = "They count as complete, with curves up to there."
    if ended:
        yield {"trials": count_trials(ended), "trials_were": were(ended), "counted": counted}


def validations_without_value(study: Analysis) -> Iterator[Values]:
    """Yield validations whose metric was not finite in a run that had not diverged."""
    first = 0
    later = 0
    kinds: set[str] = set()
    for result in finished_trials(study):
        values = values_not_finite(result, study)
        for value in values.values():
            kinds.add("NaN" if math.isnan(value) else "infinite")
        if 0 in values:
            first += 1
        elif values:
            later += 1
    places = []
    if first:
        places.append(f"at the first validation of {count_of(first)}")
    if later:
        places.append(f"at a later validation of {count_of(later)}")
    if places:
        yield {
            "metric": study.record.goal.metric,
            "kinds": " or ".join(sorted(kinds)),
            "places": " and ".join(places),
        }


def values_not_finite(result: TrialResult, study: Analysis) -> dict[int, float]:
    """Return metric values that are not finite by validation, without the one of a divergence."""
    goal = study.record.goal
    values = list(result.curve.get(goal.metric, ()))
    continued = result.steps is not None and result.steps_run > result.steps
    diverged_later = continued and result.steps_run < goal.max_steps
    if result.status is Status.INFEASIBLE or diverged_later:
        # The weights may be what was not finite at the last validation; the curve cannot show it.
        values = values[:-1]
    return {i: value for i, value in enumerate(values) if not math.isfinite(value)}


def short_steps(study: Analysis) -> Iterator[Values]:
    """Yield steps with fewer examples than the batch size."""
    yield from _share_of_steps(study, SHORT_STEPS)


def uncounted_steps(study: Analysis) -> Iterator[Values]:
    """Yield steps whose number of examples is unknown."""
    yield from _share_of_steps(study, UNCOUNTED_STEPS)


def _share_of_steps(study: Analysis, flag: str) -> Iterator[Values]:
    """Yield in how many trials some steps have a flag, and the largest share of a trial's steps."""
    results = with_flag(study, flag)
    if results:
        share = 0.0
        for result in results:
            share = max(share, result.flags[flag] / max(result.steps_run, 1))
        yield {
            "count": len(results),
            "trials": count_trials(finished_trials(study)),
            "share": percent(share),
        }


def stacked_trials(study: Analysis) -> Iterator[Values]:
    """Yield trials that were trained together in a stack."""
    yield from _trials_with_flag(study, STACKED)


def sparse_kernels(study: Analysis) -> Iterator[Values]:
    """Yield trials whose convolutions skipped pruned weights."""
    yield from _trials_with_flag(study, SPARSE_KERNELS)


def several_ranks(study: Analysis) -> Iterator[Values]:
    """Yield trials that several processes trained together."""
    yield from _trials_with_flag(study, RANKS)


def _trials_with_flag(study: Analysis, flag: str) -> Iterator[Values]:
    """Yield the number of trials with a flag, and the values of the flag, if there are any."""
    results = with_flag(study, flag)
    if results:
        values = sorted({result.flags[flag] for result in results})
        yield {
            "trials_were": were(results),
            "values": " or ".join(map("{:.0f}".format, values)),
        }


def within_warm_up(study: Analysis) -> Iterator[Values]:
    """Yield cells whose goal is met within the warm-up of the learning rate."""
    cells = []
    for cell, k_star, warm_up, _ in _schedules(study):
        if k_star <= warm_up:
            cells.append(f"{cell} (step {k_star:g} of {warm_up})")
    if cells:
        yield {"cells": "; ".join(first_names(cells))}


def early_in_schedule(study: Analysis) -> Iterator[Values]:
    """Yield cells whose goal is met early in the schedule, after the warm-up."""
    cells = []
    for cell, k_star, warm_up, length in _schedules(study):
        if warm_up < k_star < EARLY_SHARE * length and length > warm_up + 1:
            cells.append(f"{cell} ({percent(k_star / length)} of {length} steps)")
    if cells:
        yield {"cells": "; ".join(first_names(cells))}


def _schedules(study: Analysis) -> Iterator[tuple[str, float, int, int]]:
    """Yield cell, K*, warm-up and length of the schedule of each K* trial that has one."""
    for cell in study.cells:
        if cell.best is not None and cell.k_star is not None and SCHEDULE in cell.best.flags:
            flags = cell.best.flags
            yield str(cell.cell), cell.k_star, int(flags[WARM_UP]), int(flags[SCHEDULE])


def warm_up_notes(results: Sequence[TrialResult], k_of: Mapping[int, float]) -> list[str]:
    """Return a note on batch sizes whose predicted K is not larger than the warm-up of the rate.

    Args:
        results: Trials of the study; nothing is noted where their warm-ups differ.
        k_of: Predicted K by batch size.
    """
    warm_ups = {result.flags[WARM_UP] for result in results if WARM_UP in result.flags}
    if len(warm_ups) != 1:
        return []
    warm_up = warm_ups.pop()
    shorter = [size for size, k in sorted(k_of.items()) if k <= warm_up]
    if not shorter:
        return []
    sizes = f"B = {shorter[0]}"
    if len(shorter) > 1:
        sizes = f"B = {shorter[0]} to {shorter[-1]}"
    return [
        f"At {sizes} your warm-up of {warm_up:g} steps is longer than K, so the goal would be met "
        "while the rate still grows. Shorten the warm-up there."
    ]


def with_flag(study: Analysis, flag: str) -> list[TrialResult]:
    """Return the finished trials for which a count or flag was observed."""
    return [result for result in finished_trials(study) if result.flags.get(flag)]


def first_line(result: TrialResult) -> str:
    """Return the first line of the reason why a trial ended."""
    lines = result.failure.strip().splitlines()
    if not lines:
        return "no reason stored"
    return lines[0]


FAILURES = (
    Note(failed_trials, "{trials} failed: {causes}. {again} when the study is resumed."),
    Note(
        stopped_trials,
        "{trials_were} stopped by the module or a callback, before the goal and max_steps: "
        "{reason}",
    ),
    Note(diverged_after_goal, "{trials} diverged after the goal. {counted}"),
    Note(
        stopped_after_goal,
        "{trials_were} stopped by the module or a callback after the goal. {counted}",
    ),
    Note(
        validations_without_value,
        "{metric} was {kinds} {places}, although the loss was finite. Such a validation does not "
        "meet the goal, and the trial continues.",
    ),
    Note(
        short_steps,
        "Some steps had fewer than B examples in {count} of {trials} (up to {share} of a trial's "
        "steps), at the end of an epoch or of a length class. Set drop_last or use an endless "
        "loader.",
    ),
    Note(
        uncounted_steps,
        "The number of examples is unknown for some steps of {count} of {trials} (up to {share} "
        "of a trial's steps). B is the configured batch size there. Use a DataLoader with a "
        "sampler to count examples.",
    ),
)

ENGINES = (
    Note(
        stacked_trials,
        "{trials_were} trained stacked, which equals single training in distribution, not bit for "
        "bit. K* of one trial can differ by some validations.",
    ),
    Note(
        sparse_kernels,
        "{trials_were} trained by convolutions that skip pruned weights, which equals dense "
        "training in distribution, not bit for bit.",
    ),
    Note(
        several_ranks,
        "{trials_were} trained on {values} ranks, which equals one process in distribution, not "
        "bit for bit.",
    ),
)

SCHEDULES = (
    Note(
        within_warm_up,
        "The goal is met within the warm-up of the learning rate at {cells}, while the rate still "
        "grew. Make the warm-up shorter than K* at every batch size, so that K* can be compared.",
    ),
    Note(
        early_in_schedule,
        "K* is early in the schedule of the learning rate at {cells}, so its decay had no effect. "
        "A schedule that ends near the goal has another K*. Lower goal.max_steps or shorten the "
        "schedule.",
    ),
)
