"""What a reader should know before trusting the table of a study, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from lit_dps.analysis.summary import CellSummary
from lit_dps.record import StudyRecord
from lit_dps.space import short_names
from lit_dps.trial import COPIES, KEPT, PRUNABLE, RANKS, SHORT_STEPS, STACKED, TRAINED, UNSCORED, Status, TrialResult

LISTED = 3  # failed trials, or parameters, that are told one by one


def notes(record: StudyRecord, cells: Sequence[CellSummary]) -> list[str]:
    """What is missing, K* that are upper bounds, what was observed of the trials, boxes that look too small."""
    names, lines = short_names(list(record.space)), []
    missing = sum(cell.best is None for cell in cells)
    if missing == len(cells):
        lines.append("no complete trial in any cell yet: no K* and no fit to draw")
    elif missing:
        lines.append(f"no complete trial in {missing} of {len(cells)} cells: no K* there")
    pending, running = sum(cell.pending for cell in cells), sum(cell.running for cell in cells)
    if pending:
        declared = record.trials * len(cells)
        lines.append(f"{pending} of {declared} trials have not finished ({running} running or queued)")
    if bounds := sum(cell.at_first_check for cell in cells):
        lines.append(
            f"K* is at the first check in {bounds} of {len(cells)} cells: an upper bound, left out of the law; lower "
            "goal.check_interval to resolve it"
        )
    lines += observed_notes(record)
    ends = Counter((key, end) for cell in cells for key, end in cell.boundary.items())
    for (key, end), count in sorted(ends.items()):
        where = f"on the {end} end of its range in {count} of {len(cells)} cells"
        lines.append(f"the best {names[key]} lies {where}: widen it")
    return lines


def observed_notes(record: StudyRecord) -> list[str]:
    """What happened in the trials of a study that its table does not show, a line for each kind that there is.

    Numbers are those of all finished trials together; "up to" is the most of any one.
    """
    results = [result for cell in record.cells for result in record.results[cell]]

    def ended(status: Status) -> list[TrialResult]:
        return [result for result in results if result.status is status]

    def having(count: str) -> list[TrialResult]:
        return [result for result in results if result.observed.get(count)]

    kinds: dict[Callable[[list[TrialResult], int], str], list[TrialResult]] = {
        _failed: ended(Status.FAILED),
        _stopped: ended(Status.STOPPED),
        _short_steps: having(SHORT_STEPS),
        _unscored: having(UNSCORED),
        _prunable: having(TRAINED),
        _copies: having(COPIES),
        _stacked: having(STACKED),
        _ranks: having(RANKS),
    }
    return [tell(some, len(results)) for tell, some in kinds.items() if some]


def _failed(failed: list[TrialResult], total: int) -> str:
    listed = [f"{result.trial.cell} point {result.trial.point}: {_line(result)}" for result in failed]
    again = "it runs again" if len(failed) == 1 else "they run again"
    return f"{_count(len(failed))} failed: {'; '.join(_few(listed))}; {again} when the study is taken up again"


def _stopped(stopped: list[TrialResult], total: int) -> str:
    by = "its module or a callback" if len(stopped) == 1 else "their module or a callback"
    return f"{_were(stopped)} stopped by {by} before goal and budget: {_line(stopped[0])}"


def _short_steps(short: list[TrialResult], total: int) -> str:
    share = max(result.observed[SHORT_STEPS] / max(result.steps_run, 1) for result in short)
    return (
        f"in {len(short)} of {_count(total)} some steps had fewer than B examples (up to {_percent(share)} of a "
        "trial's steps; the last batch of an epoch): drop_last or an endless loader avoids them"
    )


def _unscored(unscored: list[TrialResult], total: int) -> str:
    told = []
    for series, group in groupby(unscored, lambda result: result.trial.cell.series):
        most = max((result.observed for result in group), key=lambda observed: observed[UNSCORED])
        told.append(f"{series}: up to {most[UNSCORED]:.0f} of {most[KEPT]:.0f}")
    how = "they were kept by their place in the network, not by the pruner"
    return f"{', '.join(told)} kept weights have pruning score 0: {how}"


def _prunable(few: list[TrialResult], total: int) -> str:
    least = min(few, key=lambda result: result.observed[PRUNABLE] / result.observed[TRAINED])
    prunable, trained = least.observed[PRUNABLE], least.observed[TRAINED]
    share = f"{prunable:.0f} of {trained:.0f} trained weights ({_percent(prunable / trained)})"
    return f"only {share} could be pruned, in {', '.join(_few(list(least.kept)))}: sparsity counts among those alone"


def _copies(copied: list[TrialResult], total: int) -> str:
    most = max(result.observed[COPIES] for result in copied)
    masked = f"{most:.0f} weights of copies of the pruned network, a momentum teacher say, were pruned with it"
    return f"{masked}: pruning.exclude keeps them dense"


def _stacked(stacked: list[TrialResult], total: int) -> str:
    equal = "equal to single ones in distribution, not to the bit"
    return f"{_were(stacked)} trained stacked: {equal}; K* of one trial can differ by checks"


def _ranks(shared: list[TrialResult], total: int) -> str:
    ranks = " or ".join(f"{n:.0f}" for n in sorted({result.observed[RANKS] for result in shared}))
    return f"{_were(shared)} trained by {ranks} ranks: equal to one process in distribution, not to the bit"


def _few(names: list[str]) -> list[str]:
    return [*names[:LISTED], *([f"{len(names) - LISTED} more"] if len(names) > LISTED else [])]


def _line(result: TrialResult) -> str:
    return (result.failure.strip().splitlines() or ["no reason kept"])[0]


def _count(trials: int) -> str:
    return f"{trials} trial{'' if trials == 1 else 's'}"


def _were(results: list[TrialResult]) -> str:
    return f"{_count(len(results))} {'was' if len(results) == 1 else 'were'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
