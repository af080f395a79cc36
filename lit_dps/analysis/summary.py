"""What a study has found in each cell: K*, the trial that gave it, and how the others ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lit_dps.record import StudyRecord
from lit_dps.trial import Cell, Status, TrialResult


@dataclass(frozen=True)
class CellSummary:
    """One cell of the grid.

    Attributes:
        cell: Batch size and sparsity.
        best: The complete trial of least steps to result, the lowest point among equals; None without complete ones.
        complete, incomplete, infeasible, outraced, stopped, failed: Finished trials by how they ended.
        pending: Declared trials that have not finished, started or not.
        running: Those of them that are started or queued.
        boundary: The end of its range that a metaparameter of `best` lies on, for those that do.
        at_first_check: Whether K* is only an upper bound (`at_first_check`).
    """

    cell: Cell
    best: TrialResult | None
    complete: int
    incomplete: int
    infeasible: int
    outraced: int
    stopped: int
    failed: int
    pending: int
    running: int
    boundary: dict[str, Literal["low", "high"]]
    at_first_check: bool

    @property
    def k_star(self) -> int | None:
        """K*: the fewest steps to result of any complete trial (Lee et al. 2021, Section 2); None without one."""
        return None if self.best is None else self.best.steps


def at_first_check(k_star: int | None, check_interval: int) -> bool:
    """Whether K* is the step of the first check, so that nothing says how much sooner the goal was met.

    Any other K* is known to a check interval: the goal was met after the check before it.

    Args:
        k_star: In steps; None where there is none.
        check_interval: Steps between two checks.
    """
    return k_star is not None and k_star <= check_interval


def comparable(result: TrialResult) -> bool:
    """Whether the means over a trial's run say how the trials of its cell train.

    Not of an infeasible trial; nor of one that an error, its module or a callback ended where the study would have gone
    on: its run is shorter than the protocol's, unlike an outraced one's by as much as it happened to be.
    """
    return result.status not in (Status.INFEASIBLE, Status.STOPPED, Status.FAILED)


def summarize(record: StudyRecord) -> list[CellSummary]:
    """A summary of each cell of the grid, by sparsity, then batch size."""
    return [_summarize(record, cell) for cell in record.cells]


def _summarize(record: StudyRecord, cell: Cell) -> CellSummary:
    results = record.results[cell]
    ended = [result.status for result in results]
    complete = [result for result in results if result.status is Status.COMPLETE]
    best = min(complete, key=lambda result: (result.steps, result.trial.point), default=None)
    params = {} if best is None else best.trial.params
    ends = {key: box.boundary(params[key]) for key, box in record.space.items() if key in params}
    # A study may have been declared smaller than it once was: points beyond its trials are no less finished.
    done = sum(result.trial.point < record.trials for result in results)
    return CellSummary(
        cell=cell,
        best=best,
        complete=len(complete),
        incomplete=ended.count(Status.INCOMPLETE),
        infeasible=ended.count(Status.INFEASIBLE),
        outraced=ended.count(Status.OUTRACED),
        stopped=ended.count(Status.STOPPED),
        failed=ended.count(Status.FAILED),
        pending=record.trials - done,
        running=record.running[cell],
        boundary={key: end for key, end in ends.items() if end is not None},
        at_first_check=best is not None and at_first_check(best.steps, record.goal.check_interval),
    )


def setting(config: Mapping, key: str) -> object:
    """A value of a study's configuration by its dotted key, say model.init_args.optimizer; None where it has none."""
    node: object = config
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
