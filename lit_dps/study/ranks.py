"""The ranks of a study: the first asks for trials and tells their results, the others train them with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from lit_dps.engines.engine import Engine
from lit_dps.parallel import launch, ranks
from lit_dps.runs import Run
from lit_dps.runtime import INTERRUPTED, Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.study.setup import StudySetup
from lit_dps.trial import TrialResult


class Group:
    """The first rank's side: every trial is told to the others before it is trained."""

    def __init__(self):
        self._waiting = True  # whether the others wait to be told

    def train(
        self, engine: Engine, next_run: Callable[[], Run | None], at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """As `Engine.train`, each run by all ranks."""

        def told() -> Run | None:
            if (run := next_run()) is not None:
                ranks.broadcast(run.trial)
                self._waiting = False
            return run

        for result in engine.train(told, at_check):
            self._waiting = True
            yield result

    def release(self) -> None:
        """Tells the others that there is no trial any more; within one, they find out there."""
        if self._waiting:
            ranks.broadcast(None)


@contextmanager
def group_of(setup: StudySetup) -> Iterator[Group]:
    """In here this process is the first of the ranks that train the trials of a study; it may be the only one.

    Starts the others on this machine, unless torchrun has started them.

    Raises:
        RankLost: if one of them died.
    """
    with launch.group_of(setup.ranks, setup.on_gpu, _follow_parent, setup):
        group = Group()
        try:
            yield group
        finally:
            group.release()


def follow_torchrun(setup: StudySetup) -> int:
    """Trains what the first rank says, as another of torchrun's ranks. Returns the exit code."""
    stop = StopRequest()
    # a signal while it waits for the first rank, which may have refused the command, ends it at once
    with launch.joined_by_torchrun(setup.on_gpu), interruptible(stop):
        try:
            _follow(setup, stop)
        except Interrupted:
            return INTERRUPTED
    return 0


def raise_if_any_rank_interrupted(stop: StopRequest) -> Callable[[], None]:
    """Raises Interrupted on all ranks if one of them was asked to stop; all ask at the same checks."""

    def check() -> None:
        if int(ranks.all_reduce_sum(torch.tensor(int(bool(stop))))):
            raise Interrupted(stop.signal or "another process")

    return check


def _follow_parent(setup: StudySetup) -> None:
    stop = StopRequest()
    with interruptible(stop), suppress(Interrupted):
        _follow(setup, stop)


def _follow(setup: StudySetup, stop: StopRequest) -> None:
    prepare_process()
    torch.set_num_threads(setup.study.threads)

    def next_run() -> Run | None:
        trial = ranks.broadcast(None)
        return None if trial is None else Run(trial, setup.goal_of_trials, setup.study.goals)

    for _ in setup.engine(setup.checkpoints()).train(next_run, raise_if_any_rank_interrupted(stop)):
        pass
