"""Notes on what happened in the trials of a study: ends, validation, pruning, engines, schedules.

`TRIAL_NOTES` lists the functions in the order of the report. Counts are those of all finished
trials together; "up to" is the largest value of any single trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from lit_dps.analysis.summary import CellSummary
from lit_dps.core.goal import Goal
from lit_dps.core.trial import (
    BY,
    BY_WEIGHTS,
    COPIES,
    IN_NO_MASK,
    JOINED_AT,
    KEPT,
    PRUNABLE,
    RANKS,
    SCHEDULE,
    SHORT_STEPS,
    SPARSE_KERNELS,
    STACKED,
    TRAINED,
    TRAINED_THEN,
    UNCOUNTED_STEPS,
    UNSCORED,
    WARM_UP,
    Series,
    Status,
    TrialResult,
)

# A goal that is met within this share of the schedule sees almost no decay of the rate.
EARLY_SHARE = 0.1
LISTED = 3  # failed trials, cells or parameters that a note names
IN_DISTRIBUTION = "in distribution, not bit for bit"


def failed_trials(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note trials that ended with an error; they run again."""
    failed = [result for result in results if result.status is Status.FAILED]
    if not failed:
        return
    causes = []
    for result in failed:
        causes.append(f"{result.trial.cell} sample {result.trial.point}: {first_line(result)}")
    again = "They run again when the study is resumed."
    if len(failed) == 1:
        again = "It runs again when the study is resumed."
    yield f"{count_trials(failed)} failed: {'; '.join(first_names(causes))}. {again}"


def stopped_trials(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note trials that their module or a callback ended."""
    stopped = [result for result in results if result.status is Status.STOPPED]
    if stopped:
        yield (
            f"{were(stopped)} stopped by the module or a callback, before the goal and max_steps: "
            f"{first_line(stopped[0])}"
        )


def validations_without_value(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note validations whose goal metric was not finite in a run that had not diverged."""
    first = 0
    later = 0
    kinds: set[str] = set()
    for result in results:
        values = values_not_finite(result, goal)
        kinds.update("NaN" if math.isnan(value) else "infinite" for value in values.values())
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
        yield (
            f"{goal.metric} was {' or '.join(sorted(kinds))} {' and '.join(places)}, although the "
            "loss was finite. Such a validation does not meet the goal, and the trial continues."
        )


def values_not_finite(result: TrialResult, goal: Goal) -> dict[int, float]:
    """Return metric values that are not finite by validation, without the one of a divergence."""
    values = list(result.curve.get(goal.metric, ()))
    continued = result.steps is not None and result.steps_run > result.steps
    diverged_later = continued and result.steps_run < goal.max_steps
    if result.status is Status.INFEASIBLE or diverged_later:
        # The weights may be what was not finite at the last validation; the curve does not say so.
        values = values[:-1]
    return {i: value for i, value in enumerate(values) if not math.isfinite(value)}


def short_steps(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note steps with fewer examples than the batch size."""
    short = with_flag(results, SHORT_STEPS)
    if short:
        yield (
            f"Some steps had fewer than B examples in {len(short)} of {count_trials(results)} (up "
            f"to {largest_share_of_steps(short, SHORT_STEPS)} of a trial's steps), at the end of "
            "an epoch or of a length class. Set drop_last or use an endless loader."
        )


def uncounted_steps(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note steps whose number of examples is unknown."""
    uncounted = with_flag(results, UNCOUNTED_STEPS)
    if uncounted:
        yield (
            f"The number of examples is unknown for some steps of {len(uncounted)} of "
            f"{count_trials(results)} (up to {largest_share_of_steps(uncounted, UNCOUNTED_STEPS)} "
            "of a trial's steps). B is the configured batch size there. Use a DataLoader with a "
            "sampler to count examples."
        )


def kept_without_score(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note weights that were kept although their pruning score is 0."""
    unscored = with_flag(results, UNSCORED)
    if not unscored:
        return
    counts = []
    for series, group in groupby(unscored, lambda result: result.trial.cell.series):
        most = max(group, key=lambda result: result.flags[UNSCORED]).flags
        counts.append(f"{series}: up to {most[UNSCORED]:.0f} of {most[KEPT]:.0f}")
    yield (
        f"Some kept weights have pruning score 0 ({', '.join(counts)}). They were kept by their "
        "position in the network, not by the pruner."
    )


def inexact_sparsity(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note the shares of weights kept by methods that do not keep exactly 1 - sparsity of them."""
    for unit, shares in sorted(kept_shares(results).items()):
        ranges = []
        for series, values in sorted(shares.items()):
            ranges.append(f"{series}: {percent(min(values))} to {percent(max(values))}")
        meaning = f"Sparsity counts {unit.removeprefix(BY).replace('_', ' ')}, not weights"
        if unit == BY_WEIGHTS:
            meaning = "The pruning method keeps 1 - S of the weights only approximately"
        yield f"{meaning}. Share of weights kept: {'; '.join(ranges)}."


def kept_shares(results: Sequence[TrialResult]) -> dict[str, dict[Series, list[float]]]:
    """Return the shares of weights that trials keep, by what their sparsity counts and series."""
    shares: dict[str, dict[Series, list[float]]] = {}
    for result in results:
        units = [flag for flag in result.flags if flag.startswith(BY)]
        if not units:
            continue
        kept = sum(count for count, _ in result.kept.values())
        total = sum(total for _, total in result.kept.values())
        for unit in units:
            of_series = shares.setdefault(unit, {})
            of_series.setdefault(result.trial.cell.series, []).append(kept / total)
    return shares


def few_prunable_weights(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note that only a part of the trained weights can be pruned."""
    few = with_flag(results, TRAINED)
    if not few:
        return
    least = min(few, key=lambda result: result.flags[PRUNABLE] / result.flags[TRAINED])
    prunable = least.flags[PRUNABLE]
    trained = least.flags[TRAINED]
    yield (
        f"Only {prunable:.0f} of {trained:.0f} trained weights ({percent(prunable / trained)}) can "
        f"be pruned, in {', '.join(first_names(list(least.kept)))}. Sparsity refers to these alone."
    )


def weights_without_mask(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note weights that joined the training after pruning."""
    joined = with_flag(results, IN_NO_MASK)
    if not joined:
        return
    most = max(joined, key=lambda result: result.flags[IN_NO_MASK] / result.flags[TRAINED_THEN])
    yield (f"{most.trial.cell}: {unmasked_note(most.flags)} ({count_trials(joined)} affected)")


def unmasked_note(observed: Mapping[str, float]) -> str:
    """Return the sentence about trained weights in no mask; empty if the mask covers all.

    Args:
        observed: As `TrialResult.flags`.
    """
    if not observed.get(IN_NO_MASK):
        return ""
    dense = observed[IN_NO_MASK]
    trained = observed[TRAINED_THEN]
    return (
        f"{dense:.0f} of {trained:.0f} weights trained at step {observed[JOINED_AT]:.0f} have no "
        "mask. They joined the training after pruning and stay dense, so the network is less "
        "sparse than S. Train them from the first step, or name them in pruning.exclude."
    )


def pruned_copies(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note copies of the network that were pruned with it."""
    copied = with_flag(results, COPIES)
    if copied:
        most = max(result.flags[COPIES] for result in copied)
        yield (
            f"{most:.0f} weights in copies of the pruned network, such as a momentum teacher, were "
            "pruned too. Name the copies in pruning.exclude to keep them dense."
        )


def stacked_trials(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note trials that were trained together in a stack."""
    stacked = with_flag(results, STACKED)
    if stacked:
        yield (
            f"{were(stacked)} trained stacked, which equals single training {IN_DISTRIBUTION}. K* "
            "of one trial can differ by some validations."
        )


def sparse_kernels(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note trials whose convolutions skipped pruned weights."""
    sparse = with_flag(results, SPARSE_KERNELS)
    if sparse:
        yield (
            f"{were(sparse)} trained by convolutions that skip pruned weights, which equals dense "
            f"training {IN_DISTRIBUTION}."
        )


def several_ranks(results: Sequence[TrialResult], goal: Goal) -> Iterator[str]:
    """Note trials that several processes trained together."""
    shared = with_flag(results, RANKS)
    if shared:
        counts = sorted({result.flags[RANKS] for result in shared})
        ranks = " or ".join(f"{count:.0f}" for count in counts)
        yield (
            f"{were(shared)} trained on {ranks} ranks, which equals one process {IN_DISTRIBUTION}."
        )


TRIAL_NOTES = (
    failed_trials,
    stopped_trials,
    validations_without_value,
    short_steps,
    uncounted_steps,
    kept_without_score,
    inexact_sparsity,
)
# The notes on empty layers, which need the whole record, are between these two tables.
TRIAL_NOTES_AFTER_LAYERS = (
    few_prunable_weights,
    weights_without_mask,
    pruned_copies,
    stacked_trials,
    sparse_kernels,
    several_ranks,
)


def schedule_notes(cells: Sequence[CellSummary]) -> list[str]:
    """Return notes on goals met within the warm-up, or early in the schedule, of the rate."""
    within, early = [], []
    for cell in cells:
        if cell.best is None or cell.k_star is None or SCHEDULE not in cell.best.flags:
            continue
        warm_up = int(cell.best.flags[WARM_UP])
        length = int(cell.best.flags[SCHEDULE])
        if cell.k_star <= warm_up:
            within.append(f"{cell.cell} (step {cell.k_star:g} of {warm_up})")
        elif cell.k_star < EARLY_SHARE * length and length > warm_up + 1:
            early.append(f"{cell.cell} ({percent(cell.k_star / length)} of {length} steps)")
    lines = []
    if within:
        lines.append(
            "The goal is met within the warm-up of the learning rate at "
            f"{'; '.join(first_names(within))}, while the rate still grew. Make the warm-up "
            "shorter than K* at every batch size, so that K* can be compared."
        )
    if early:
        lines.append(
            "K* is early in the schedule of the learning rate at "
            f"{'; '.join(first_names(early))}, so its decay had no effect. A schedule that ends "
            "near the goal has another K*. Lower goal.max_steps or shorten the schedule."
        )
    return lines


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


def with_flag(results: Sequence[TrialResult], flag: str) -> list[TrialResult]:
    """Return the trials for which a count or flag was observed."""
    return [result for result in results if result.flags.get(flag)]


def largest_share_of_steps(results: Sequence[TrialResult], flag: str) -> str:
    """Return the largest share of the steps of a trial that a count has, in percent."""
    return percent(max(result.flags[flag] / max(result.steps_run, 1) for result in results))


def first_names(names: list[str]) -> list[str]:
    """Return the first names of a list, and how many more there are."""
    if len(names) <= LISTED:
        return names
    return [*names[:LISTED], f"{len(names) - LISTED} more"]


def first_line(result: TrialResult) -> str:
    """Return the first line of the reason why a trial ended."""
    lines = result.failure.strip().splitlines()
    return lines[0] if lines else "no reason stored"


def count_trials(results: Sequence[TrialResult]) -> str:
    """Return the number of trials: 1 trial, 5 trials."""
    return count_of(len(results))


def count_of(trials: int) -> str:
    """Return a number of trials with its noun: 1 trial, 5 trials."""
    return "1 trial" if trials == 1 else f"{trials} trials"


def were(results: Sequence[TrialResult]) -> str:
    """Return the number of trials with its verb: 1 trial was, 5 trials were."""
    verb = "was" if len(results) == 1 else "were"
    return f"{count_trials(results)} {verb}"


def percent(share: float) -> str:
    """Return a share as text: 12.5 %."""
    return f"{100 * share:.3g} %"
