"""Notes on what was observed while the trials of a study ran (`lit_dps.trial`) and on those that ended early."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lit_dps.record import StudyRecord
from lit_dps.trial import COPIES, KEPT, PRUNABLE, RANKS, SHORT_STEPS, STACKED, TRAINED, UNSCORED, Status, TrialResult

LISTED = 3  # failed trials, or parameters, that are told one by one


def observed_notes(record: StudyRecord) -> list[str]:
    """What happened in the trials of a study that its table does not show, a line for each kind that there is.

    Numbers are those of all finished trials together; "up to" is the most of any one.
    """
    results = [result for cell in record.cells for result in record.results[cell]]
    kinds: tuple[Callable[[Sequence[TrialResult]], str | None], ...] = (
        _failed,
        _stopped,
        _short_steps,
        _unscored,
        _prunable,
        _copies,
        _stacked,
        _ranks,
    )
    return [line for kind in kinds if (line := kind(results)) is not None]


def _failed(results: Sequence[TrialResult]) -> str | None:
    failed = [result for result in results if result.status is Status.FAILED]
    if not failed:
        return None
    listed = [f"{result.trial.cell} point {result.trial.point}: {_line(result)}" for result in failed[:LISTED]]
    more = [f"{len(failed) - LISTED} more"] if len(failed) > LISTED else []
    again = "it runs again" if len(failed) == 1 else "they run again"
    return f"{_count(failed)} failed: {'; '.join([*listed, *more])}; {again} when the study is taken up again"


def _stopped(results: Sequence[TrialResult]) -> str | None:
    stopped = [result for result in results if result.status is Status.STOPPED]
    if not stopped:
        return None
    by = "its module or a callback" if len(stopped) == 1 else "their module or a callback"
    return f"{_were(stopped)} stopped by {by} before goal and budget: {_line(stopped[0])}"


def _short_steps(results: Sequence[TrialResult]) -> str | None:
    short = [result for result in results if result.observed.get(SHORT_STEPS)]
    if not short:
        return None
    share = max(result.observed[SHORT_STEPS] / max(result.steps_run, 1) for result in short)
    return (
        f"in {len(short)} of {_count(results)} some steps had fewer than B examples (up to {_percent(share)} of a "
        "trial's steps; the last batch of an epoch): drop_last or an endless loader avoids them"
    )


def _unscored(results: Sequence[TrialResult]) -> str | None:
    most: dict[float, TrialResult] = {}
    for result in results:
        sparsity = result.trial.cell.sparsity
        if result.observed.get(UNSCORED, 0) > (most[sparsity].observed[UNSCORED] if sparsity in most else 0):
            most[sparsity] = result
    if not most:
        return None
    told = [f"S={s:g}: up to {r.observed[UNSCORED]:.0f} of {r.observed[KEPT]:.0f}" for s, r in sorted(most.items())]
    how = "they were kept by their place in the network, not by the pruner"
    return f"{', '.join(told)} kept weights have pruning score 0: {how}"


def _prunable(results: Sequence[TrialResult]) -> str | None:
    few = [result for result in results if result.observed.get(TRAINED)]
    if not few:
        return None
    least = min(few, key=lambda result: result.observed[PRUNABLE] / result.observed[TRAINED])
    prunable, trained, names = least.observed[PRUNABLE], least.observed[TRAINED], list(least.kept)
    share = f"{prunable:.0f} of {trained:.0f} trained weights ({_percent(prunable / trained)})"
    more = [f"{len(names) - LISTED} more"] if len(names) > LISTED else []
    return f"only {share} could be pruned, in {', '.join([*names[:LISTED], *more])}: sparsity counts among those alone"


def _copies(results: Sequence[TrialResult]) -> str | None:
    copied = [result.observed[COPIES] for result in results if result.observed.get(COPIES)]
    if not copied:
        return None
    masked = f"{max(copied):.0f} weights of copies of the pruned network, a momentum teacher say, were pruned with it"
    return f"{masked}: pruning.exclude keeps them dense"


def _stacked(results: Sequence[TrialResult]) -> str | None:
    stacked = [result for result in results if result.observed.get(STACKED)]
    if not stacked:
        return None
    equal = "equal to single ones in distribution, not to the bit"
    return f"{_were(stacked)} trained stacked: {equal}; K* of one trial can differ by checks"


def _ranks(results: Sequence[TrialResult]) -> str | None:
    shared = [result for result in results if result.observed.get(RANKS)]
    if not shared:
        return None
    ranks = " or ".join(f"{n:.0f}" for n in sorted({result.observed[RANKS] for result in shared}))
    return f"{_were(shared)} trained by {ranks} ranks: equal to one process in distribution, not to the bit"


def _line(result: TrialResult) -> str:
    return (result.failure.strip().splitlines() or ["no reason kept"])[0]


def _count(results: Sequence[TrialResult]) -> str:
    return f"{len(results)} trial{'' if len(results) == 1 else 's'}"


def _were(results: Sequence[TrialResult]) -> str:
    return f"{_count(results)} {'was' if len(results) == 1 else 'were'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
