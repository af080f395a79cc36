"""The ranks of a study: the first asks for trials and tells their results, the others train them with it."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from lit_dps.allocator import keep_freed_memory
from lit_dps.engines.base import Engine
from lit_dps.parallel import launch, ranks
from lit_dps.study.interrupt import INTERRUPTED, Interrupted, Leave, interruptible
from lit_dps.study.setup import StudySetup
from lit_dps.trial import Trial, TrialResult


class Group:
    """The first rank's side: every trial is told to the others before it is trained."""

    def __init__(self):
        self._waiting = True  # whether the others wait to be told

    def run(self, engine: Engine, trials: Iterable[Trial]) -> Iterator[TrialResult]:
        """The results of the trials, each trained by all ranks."""
        for result in engine.run(self._told(trials)):
            self._waiting = True
            yield result

    def release(self) -> None:
        """Tells the others that there is no trial any more; within one, they find out there."""
        if self._waiting:
            ranks.shared(None)

    def _told(self, trials: Iterable[Trial]) -> Iterator[Trial]:
        for trial in trials:
            ranks.shared(trial)
            self._waiting = False
            yield trial


@contextmanager
def group_of(setup: StudySetup) -> Iterator[Group]:
    """In here this process is the first of the ranks that train the trials of a study; it may be the only one.

    Starts the others on this machine, unless torchrun has started them.

    Raises:
        RankLost: if one of them died.
    """
    if ranks.started_by_torchrun():
        joined = ranks.joined_by_torchrun(setup.on_gpu)
    elif setup.ranks > 1:
        joined = launch.group_of(setup.ranks, setup.on_gpu, _follow_parent, setup)
    else:
        joined = nullcontext()
    with joined:
        group = Group()
        try:
            yield group
        finally:
            group.release()


def follow_torchrun(setup: StudySetup) -> int:
    """Trains what the first rank says, as another of torchrun's ranks. Returns the exit code."""
    leave = Leave()
    # a signal while it waits for the first rank, which may have refused the command, ends it at once
    with ranks.joined_by_torchrun(setup.on_gpu), interruptible(leave):
        try:
            _follow(setup, leave)
        except Interrupted:
            return INTERRUPTED
    return 0


def leave_together(leave: Leave) -> Callable[[], None]:
    """Raises Interrupted on all ranks if one of them was asked to leave; all ask at the same checks."""

    def check() -> None:
        if int(ranks.add_up(torch.tensor(int(bool(leave))))):
            raise Interrupted(leave.signal or "another process")

    return check


def prepare_process() -> None:
    """What every process of a study begins with."""
    keep_freed_memory()
    # a study prints its own progress; Lightning's tips and deprecation warnings would bury it
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def _follow_parent(setup: StudySetup) -> None:
    leave = Leave()
    with interruptible(leave), suppress(Interrupted):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the first rank decides
        _follow(setup, leave)


def _follow(setup: StudySetup, leave: Leave) -> None:
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    engine = setup.engine(after_check=leave_together(leave), checkpoints=setup.checkpoints())
    for _ in engine.run(iter(lambda: ranks.shared(None), None)):
        pass
