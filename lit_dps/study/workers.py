"""Workers: processes that ask a study for trials, train them and tell the results."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress

import torch

from lit_dps.analysis.racing import heats
from lit_dps.engines.checkpoints import Checkpoints
from lit_dps.errors import UserError
from lit_dps.parallel.launch import die_with_parent
from lit_dps.study.group import group_of, leave_together, quiet
from lit_dps.study.interrupt import Interrupted, Leave, interruptible
from lit_dps.study.setup import StudySetup
from lit_dps.study.sobol import SobolSampler
from lit_dps.study.store import Store
from lit_dps.trial import TrialResult

GRACE = 20  # seconds that a worker has to finish its check and leave when another one failed


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


class WorkerDied(UserError):
    """A worker was killed, by the system's want of memory perhaps."""


def work(setup: StudySetup, leave: Leave) -> Iterator[TrialResult]:
    """Runs trials of the study in this process until none is left, storing each result before it is yielded.

    Where several ranks train each trial this is the first of them, and starts the others unless torchrun did.

    Raises:
        Interrupted: at the end of a check or a trial, if `leave` says so. The trial is given back.
        RankLost: if another rank died. Likewise.
    """
    quiet()
    torch.set_num_threads(setup.study.threads)
    config = setup.study
    sampler = SobolSampler(config.space, config.seed, config.scramble)
    url = setup.storage.optuna_url
    goal = setup.goal_of_trials
    paused = heats(goal.check_interval, goal.max_steps)
    store = Store(url, config.name, setup.cells, config.trials, sampler, config.seed, config.slack, paused, setup.uid)
    try:
        with group_of(setup) as group:
            checkpoints, check = _checkpoints(setup), leave_together(leave)
            asked = {"limit": store.limit, "pause": store.pause, "after_check": check, "checkpoints": checkpoints}
            engine, found = setup.engine(**asked), True
            while found:  # an engine may have asked for its last trial before another one stopped to be run again
                found = False
                for result in group.run(engine, store.ask()):
                    found = True
                    store.tell(result)
                    if checkpoints is not None:
                        checkpoints.told(result, store.limit(result.trial.cell))
                    yield result
                    leave.check()
    finally:
        store.abandon()


def _checkpoints(setup: StudySetup) -> Checkpoints | None:
    name, minutes = setup.study.name, setup.study.checkpoint_minutes
    if minutes is None:
        return None
    return Checkpoints(setup.storage.checkpoints(name), setup.stamp, minutes)


def work_in_processes(setup: StudySetup, workers: int, leave: Leave) -> Iterator[TrialResult]:
    """The same by several processes at a time; yields their results as they come.

    Raises:
        Interrupted: if this process, or the last of them that could go on, was asked to leave.
        UserError: that a worker met.
        WorkerDied: if a worker was killed. The others finish their checks and give their trials back.
        WorkerError: if a worker failed otherwise. Likewise.
    """
    context = multiprocessing.get_context("spawn")  # a forked child would share database connections and threads
    results, leaving = context.Queue(), context.Event()
    daemon = setup.ranks == 1  # a daemon may have no processes of its own
    processes = [context.Process(target=_worker, args=(setup, results, leaving), daemon=daemon) for _ in range(workers)]
    interrupted = None
    try:
        for process in processes:
            process.start()
        left = workers
        while left:
            if leave:
                leaving.set()
            try:
                message = results.get(timeout=1)
            except queue.Empty:
                _raise_if_killed(processes)
                continue
            if isinstance(message, TrialResult):
                yield message
            elif message is None:
                left -= 1
            elif isinstance(message, Interrupted):  # of one worker alone: the others go on
                left, interrupted = left - 1, message
            else:
                raise message
        leave.check()
        if interrupted is not None:
            raise interrupted
    finally:
        leaving.set()
        _end(processes, 0.0 if leave.now else GRACE)


def _worker(setup: StudySetup, results, leaving) -> None:
    threading.Thread(target=die_with_parent, daemon=True).start()
    leave = Leave(leaving.is_set)
    with interruptible(leave):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
        try:
            for result in work(setup, leave):
                results.put(result)
            results.put(None)
        except (UserError, Interrupted) as error:
            results.put(error)
        except Exception:  # not swallowed: the parent raises it, with this traceback
            results.put(WorkerError(traceback.format_exc()))


def _raise_if_killed(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        if process.exitcode not in (None, 0):
            raise WorkerDied(
                f"worker {process.pid} was killed (exit code {process.exitcode}); the same command goes on"
            )


def _end(processes: list[multiprocessing.Process], grace: float) -> None:
    end = time.monotonic() + grace
    for process in processes:
        with suppress(AssertionError):  # never started
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
