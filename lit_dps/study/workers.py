"""Workers: processes that ask a study for trials, train them and tell the results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress

import torch

from lit_dps.analysis.racing import heats
from lit_dps.errors import UserError
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

    Raises:
        Interrupted: at the end of a check or a trial, if `leave` says so. The trial is given back.
    """
    quiet()
    torch.set_num_threads(setup.study.threads)
    config = setup.study
    sampler = SobolSampler(config.space, config.seed, config.scramble)
    url = setup.storage.optuna_url
    goal = setup.goal_of_trials
    paused = heats(goal.check_interval, goal.max_steps)
    store = Store(url, config.name, setup.cells, config.trials, sampler, config.seed, config.slack, paused)
    try:
        engine, found = setup.engine(limit=store.limit, pause=store.pause, after_check=leave.check), True
        while found:  # an engine may have asked for its last trial before another one stopped to be run again
            found = False
            for result in engine.run(store.ask()):
                found = True
                store.tell(result)
                yield result
                leave.check()
    finally:
        store.abandon()


def work_in_processes(setup: StudySetup, workers: int, leave: Leave) -> Iterator[TrialResult]:
    """The same by several processes at a time; yields their results as they come.

    Raises:
        Interrupted: if this process or all of them were asked to leave.
        UserError: that a worker met.
        WorkerDied: if a worker was killed. The others finish their checks and give their trials back.
        WorkerError: if a worker failed otherwise. Likewise.
    """
    context = multiprocessing.get_context("spawn")  # a forked child would share database connections and threads
    results, leaving = context.Queue(), context.Event()
    processes = [context.Process(target=_worker, args=(setup, results, leaving), daemon=True) for _ in range(workers)]
    interrupted, finished = None, False
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
                left, finished = left - 1, True
            elif isinstance(message, Interrupted):  # of one worker alone: the others go on
                left, interrupted = left - 1, message
            else:
                raise message
        leave.check()
        if interrupted is not None and not finished:
            raise interrupted
    finally:
        leaving.set()
        _end(processes, 0.0 if leave.now else GRACE)


def _worker(setup: StudySetup, results, leaving) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
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


def _die_with_parent() -> None:
    """A worker whose parent was killed must not train on unseen: it would hold its trials."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


def quiet() -> None:
    """A study prints its own progress; Lightning's tips and deprecation warnings would bury it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
