"""What a reader should know before trusting the table of a study, a line each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.layers import empty_layers, jacobian_notes
from lit_dps.analysis.repeats import median_notes, repeat_notes
from lit_dps.analysis.summary import CellSummary, at_first_check
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import short_names
from lit_dps.core.space_history import told, widened
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
from lit_dps.report.environment_notes import environment_notes
from lit_dps.report.no_result import missed_text

EARLY = 0.1  # of the schedule: as good as none of a decay by then
LISTED = 3  # failed trials, or parameters, that are told one by one


def study_notes(study: Analysis) -> list[str]:
    """Return what a reader should know before trusting the table of a study, a line each."""
    return [
        *notes(study.record, study.cells),
        *repeat_notes(study.record, study.repeats, study.whole),
        *median_notes(study.scalings, study.median_scalings, study.record.goal.check_interval),
    ]


def notes(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """What is missing, K* that are upper bounds, what was observed of the trials, boxes that look
    too small."""
    names, lines = short_names(list(record.space)), []
    missing = sum(cell.best is None for cell in cells)
    if missing == len(cells):
        yet = " yet" if any(cell.pending for cell in cells) else ""
        lines.append(f"no complete trial in any cell{yet}: no K* and no fit to draw")
    elif missing:
        without = [cell for cell in cells if cell.best is None]
        reached = _few([text for cell in without if (text := missed_text(record.goal, cell))])
        line = f"no complete trial in {missing} of {len(cells)} cells: no K* there"
        lines.append("; ".join([line, *reached]))
    pending, running = sum(cell.pending for cell in cells), sum(cell.running for cell in cells)
    if pending:
        declared = record.trials * len(cells)
        lines.append(
            f"{pending} of {declared} trials have not finished ({running} running or queued)"
        )
    lines += _untold_notes(record, cells)
    if bounds := sum(at_first_check(cell.k_star, record.goal.check_interval) for cell in cells):
        lines.append(
            f"K* is at the first check in {bounds} of {len(cells)} cells: an upper bound, left "
            "out of the law; lower "
            "goal.check_interval to resolve it"
        )
    alone = [
        cell
        for cell in cells
        if len(cell.steps) > 1 and sum(k is not None for k in cell.steps) == 1
    ]
    if lone := sum(not record.repeats.get(cell.cell) and not cell.at_first_check for cell in alone):
        lines.append(
            f"only one trial was complete in {lone} of {len(cells)} cells: intervals over trials "
            "cannot know what "
            "another would have needed; study.repeats, more trials or a larger study.slack tell"
        )
    if (sampler := setting(record.config, "study.sampler") or "sobol") != "sobol":
        lines.append(
            f"study.sampler {sampler} drew the points from earlier results, which is not of the "
            "paper's protocol: they "
            "differ between cells, and intervals over trials, which take them to be independent, "
            "are too narrow; it is "
            "repeatable by one worker without an interruption alone"
        )
    if (best_of := setting(record.config, "study.best_of")) is not None:
        shared = any(
            r.trial.seed == record.seed for results in record.results.values() for r in results
        )
        lines.append(
            f"all trials of a cell are at the point of K* of study {best_of}, on other seeds: K* "
            "here is that of the "
            "luckiest seed, not of a search"
            + "; begun by an earlier version, it may have the very trial that was best there "
            "among them" * shared
        )
    lines += run_on_notes(record)
    lines += environment_notes(record)
    lines += observed_notes(record)
    lines += schedule_notes(cells)
    lines += told(record.boxes, names)
    ends = Counter((key, end) for cell in cells for key, end in cell.boundary.items())
    for (key, end), count in sorted(ends.items()):
        where = f"on the {end} end of its range in {count} of {len(cells)} cells"
        stays = widened(record.space[key], [end]) == record.space[key]
        beyond = "nothing lies beyond" if stays else "lit-dps study --extend-space widens it"
        lines.append(f"the best {names[key]} lies {where}: {beyond}")
    return lines


def _untold_notes(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """That trials are left out at this goal, and which K* are upper bounds for that."""
    if not (count := sum(len(cell.undetermined_points) for cell in cells)):
        return []
    why = "their checks stopped early (goal.early_reject), at the study's own goals"
    line = (
        f"of {count} of {record.trials * len(cells)} trials nobody can tell when they met "
        f"{record.goal}: {why}"
    )
    if sooner := sum(cell.sooner for cell in cells):
        line += (
            f"; K* is an upper bound in {sooner} of {len(cells)} cells, where one may be "
            "faster: "
            "left out of the law"
        )
    return [line]


def run_on_notes(record: StudyRecord) -> list[str]:
    """That runs which went on after their goal ended before the budget, if some did: they are
    complete."""
    results = (
        [result for cell in record.cells for result in record.results[cell]]
        if record.run_on
        else []
    )
    short = [
        r for r in results if r.status is Status.COMPLETE and r.steps_run < record.goal.max_steps
    ]
    diverged, stopped = [r for r in short if not r.failure], [r for r in short if r.failure]
    ends = ((diverged, "diverged"), (stopped, "stopped by the module or a callback"))
    return [
        f"{_were(some) if how != 'diverged' else _count(some)} {how} after the goal: complete, "
        "the curve ends there"
        for some, how in ends
        if some
    ]


def observed_notes(record: StudyRecord) -> list[str]:
    """What happened in the trials of a study that its table does not show, a line for each kind
    that there is.

    Numbers are those of all finished trials together; "up to" is the most of any one.
    """
    results, lines = [result for cell in record.cells for result in record.results[cell]], []

    def ended(status: Status) -> list[TrialResult]:
        return [result for result in results if result.status is status]

    def having(count: str) -> list[TrialResult]:
        return [result for result in results if result.observed.get(count)]

    if failed := ended(Status.FAILED):
        listed = _few([f"{r.trial.cell} point {r.trial.point}: {_line(r)}" for r in failed])
        again = "it runs again" if len(failed) == 1 else "they run again"
        lines.append(
            f"{_count(failed)} failed: {'; '.join(listed)}; {again} when the study is taken up "
            "again"
        )
    if stopped := ended(Status.STOPPED):
        by = "its module or a callback" if len(stopped) == 1 else "their module or a callback"
        lines.append(
            f"{_were(stopped)} stopped by {by} before goal and budget: {_line(stopped[0])}"
        )
    lines += _valueless_notes(record.goal, results)
    if short := having(SHORT_STEPS):
        share = max(result.observed[SHORT_STEPS] / max(result.steps_run, 1) for result in short)
        lines.append(
            f"in {len(short)} of {_count(results)} some steps had fewer than B examples (up to "
            f"{_percent(share)} of a "
            "trial's steps; the last batch of an epoch, or of a length class): drop_last or an "
            "endless loader avoids "
            "them"
        )
    if uncounted := having(UNCOUNTED_STEPS):
        share = max(
            result.observed[UNCOUNTED_STEPS] / max(result.steps_run, 1) for result in uncounted
        )
        lines.append(
            f"in {len(uncounted)} of {_count(results)} the examples of some steps are not known "
            "(up to "
            f"{_percent(share)} of a trial's steps): B is what the key says, and no more is known "
            "of it. A DataLoader "
            "with a sampler tells how many examples it takes"
        )
    if unscored := having(UNSCORED):
        told = []
        for series, group in groupby(unscored, lambda result: result.trial.cell.series):
            most = max(
                (result.observed for result in group), key=lambda observed: observed[UNSCORED]
            )
            told.append(f"{series}: up to {most[UNSCORED]:.0f} of {most[KEPT]:.0f}")
        how = "they were kept by their place in the network, not by the pruner"
        lines.append(f"{', '.join(told)} kept weights have pruning score 0: {how}")
    lines += inexact_notes(results)
    lines += [*empty_layers(record), *jacobian_notes(record)]
    if few := having(TRAINED):
        least = min(few, key=lambda result: result.observed[PRUNABLE] / result.observed[TRAINED])
        prunable, trained = least.observed[PRUNABLE], least.observed[TRAINED]
        share = f"{prunable:.0f} of {trained:.0f} trained weights ({_percent(prunable / trained)})"
        where = ", ".join(_few(list(least.kept)))
        lines.append(f"only {share} could be pruned, in {where}: sparsity counts among those alone")
    if joined := having(IN_NO_MASK):
        most = max(
            joined, key=lambda result: result.observed[IN_NO_MASK] / result.observed[TRAINED_THEN]
        )
        lines.append(
            f"{most.trial.cell}: {unmasked_note(most.observed)} ({_count(joined)} affected)"
        )
    if copied := having(COPIES):
        most = max(result.observed[COPIES] for result in copied)
        masked = (
            f"{most:.0f} weights of copies of the pruned network, a momentum teacher say, "
            "were "
            "pruned with it"
        )
        lines.append(f"{masked}: pruning.exclude keeps them dense")
    if stacked := having(STACKED):
        equal = "equal to single ones in distribution, not to the bit"
        lines.append(
            f"{_were(stacked)} trained stacked: {equal}; K* of one trial can differ by checks"
        )
    if sparse := having(SPARSE_KERNELS):
        by = "trained by convolutions that skip pruned weights"
        lines.append(f"{_were(sparse)} {by}: equal to dense ones in distribution, not to the bit")
    if shared := having(RANKS):
        ranks = " or ".join(
            f"{n:.0f}" for n in sorted({result.observed[RANKS] for result in shared})
        )
        lines.append(
            f"{_were(shared)} trained by {ranks} ranks: equal to one process in distribution, not "
            "to the bit"
        )
    return lines


def schedule_notes(cells: Sequence[CellSummary]) -> list[str]:
    """Return notes on goals that are met within the warm-up, or early in the schedule, of the
    learning rate."""
    within, early = [], []
    for cell in cells:
        if cell.best is None or cell.k_star is None or SCHEDULE not in cell.best.observed:
            continue
        warm_up, length = (int(cell.best.observed[key]) for key in (WARM_UP, SCHEDULE))
        if cell.k_star <= warm_up:
            within.append(f"{cell.cell} (step {cell.k_star:g} of {warm_up})")
        elif cell.k_star < EARLY * length and length > warm_up + 1:
            early.append(f"{cell.cell} ({_percent(cell.k_star / length)} of {length} steps)")
    lines = []
    if within:
        lines.append(
            "the goal is met within the warm-up of the learning rate at "
            f"{'; '.join(_few(within))}: your warm-up is "
            "longer than K* there, so the rate still grew. "
            "A warm-up that is shorter than K* at every batch size makes the K* comparable"
        )
    if early:
        lines.append(
            f"K* lies early in the schedule of the learning rate at {'; '.join(_few(early))}: "
            "its decay played no part. A schedule that ends near the goal has another K*; lower "
            "goal.max_steps, or the "
            "schedule's own length"
        )
    return lines


def warm_up_notes(results: Sequence[TrialResult], k_of: Mapping[int, float]) -> list[str]:
    """Return a note on batch sizes whose predicted K is not larger than the warm-up of the learning
    rate.

    Args:
        results: Trials of the study; nothing is noted where their warm-ups differ.
        k_of: Predicted K by batch size.
    """
    warm_ups = {result.observed[WARM_UP] for result in results if WARM_UP in result.observed}
    if len(warm_ups) != 1:
        return []
    warm_up = warm_ups.pop()
    shorter = [size for size, k in sorted(k_of.items()) if k <= warm_up]
    if not shorter:
        return []
    sizes = f"B = {shorter[0]}" if len(shorter) == 1 else f"B = {shorter[0]} to {shorter[-1]}"
    return [
        f"at {sizes} your warm-up of {warm_up:g} steps is longer than K: the goal would be met "
        "while the rate still "
        "grows. Shorten the warm-up there"
    ]


def inexact_notes(results: Sequence[TrialResult]) -> list[str]:
    """What shares of the weights were kept by pruning methods that do not keep exactly 1 - sparsity
    of them."""
    shares: dict[str, dict[Series, list[float]]] = {}
    for result in results:
        for key in result.observed:
            if key.startswith(BY):
                kept, total = (sum(counts) for counts in zip(*result.kept.values(), strict=True))
                of_series = shares.setdefault(key.removeprefix(BY), {})
                of_series.setdefault(result.trial.cell.series, []).append(kept / total)
    lines = []
    for unit, of_series in sorted(shares.items()):
        listed = [
            f"{s}: {_percent(min(x))} to {_percent(max(x))}" for s, x in sorted(of_series.items())
        ]
        meaning = f"sparsity counts {unit.replace('_', ' ')}, not weights"
        if BY + unit == BY_WEIGHTS:
            meaning = (
                "the pruning method does not keep exactly the share of weights that the "
                "sparsity "
                "leaves"
            )
        lines.append(f"{meaning}; of the weights are left: {'; '.join(listed)}")
    return lines


def unmasked_note(observed: Mapping[str, float]) -> str:
    """Return the line about weights that are trained but in no mask; empty if the mask covers all.

    Args:
        observed: As `TrialResult.observed`.
    """
    if not observed.get(IN_NO_MASK):
        return ""
    dense, trained, step = (observed[key] for key in (IN_NO_MASK, TRAINED_THEN, JOINED_AT))
    return (
        f"{dense:.0f} of {trained:.0f} weights trained at step {step:.0f} are in no mask: they "
        "joined the training "
        "after pruning and stay dense, so the network is less sparse than S. Let an optimizer "
        "train them from the "
        "first step, or name them in pruning.exclude"
    )


def _valueless_notes(goal: Goal, results: Sequence[TrialResult]) -> list[str]:
    """Return the note on checks whose goal metric was not finite in a run that had not diverged."""
    first = later = 0
    values: set[str] = set()
    for result in results:
        found = _valueless_checks(result, goal)
        values.update("NaN" if math.isnan(value) else "infinite" for value in found.values())
        if 0 in found:
            first += 1
        elif found:
            later += 1
    where = []
    if first:
        where.append(f"at the first check of {first} trial{'' if first == 1 else 's'}")
    if later:
        where.append(f"at a later check of {later} trial{'' if later == 1 else 's'}")
    if not where:
        return []
    what = f"{goal.metric} was {' or '.join(sorted(values))} {' and '.join(where)}"
    return [
        f"{what}, with a finite loss: such a check does not meet the goal, and the trial goes on"
    ]


def _valueless_checks(result: TrialResult, goal: Goal) -> dict[int, float]:
    """Return the values that are not finite by the number of their check, without a check that
    ended in divergence."""
    values = list(result.curve.get(goal.metric, ()))
    ran_on = result.steps is not None and result.steps_run > result.steps
    diverged = result.status is Status.INFEASIBLE or (ran_on and result.steps_run < goal.max_steps)
    if diverged:
        # Weights may be what was not finite at the last check: the curve does not say so.
        values = values[:-1]
    return {i: value for i, value in enumerate(values) if not math.isfinite(value)}


def _few(names: list[str]) -> list[str]:
    return [*names[:LISTED], *([f"{len(names) - LISTED} more"] if len(names) > LISTED else [])]


def _line(result: TrialResult) -> str:
    return (result.failure.strip().splitlines() or ["no reason kept"])[0]


def _count(results: list[TrialResult]) -> str:
    return f"{len(results)} trial{'' if len(results) == 1 else 's'}"


def _were(results: list[TrialResult]) -> str:
    return f"{_count(results)} {'was' if len(results) == 1 else 'were'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
