"""Workers: processes that ask a study for trials, train them and tell the results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from lit_dps.analysis.racing import heats
from lit_dps.errors import UserError
from lit_dps.study.setup import StudySetup
from lit_dps.study.sobol import SobolSampler
from lit_dps.study.store import Store
from lit_dps.trial import TrialResult

GRACE = 20  # seconds that an interrupted worker has to give its trial back


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. No Exception, so that nothing on the way takes it for a failed trial."""


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


def work(setup: StudySetup) -> Iterator[TrialResult]:
    """Runs trials of the study in this process until none is left, storing each result before it is yielded."""
    quiet()
    torch.set_num_threads(setup.study.threads)
    config = setup.study
    sampler = SobolSampler(config.space, config.seed, config.scramble)
    url = setup.storage.optuna_url
    goal = setup.goal_of_trials
    paused = heats(goal.check_interval, goal.max_steps)
    store = Store(url, config.name, setup.cells, config.trials, sampler, config.seed, config.slack, paused)
    try:
        engine, found = setup.engine(limit=store.limit, pause=store.pause), True
        while found:  # an engine may have asked for its last trial before another one stopped to be run again
            found = False
            for result in engine.run(store.ask()):
                found = True
                store.tell(result)
                yield result
    finally:
        store.abandon()


def work_in_processes(setup: StudySetup, workers: int) -> Iterator[TrialResult]:
    """The same by several processes at a time; yields their results as they come.

    Raises:
        UserError: that a worker met.
        WorkerError: if a worker failed otherwise or was killed. The others are ended and give their trials back.
    """
    context = multiprocessing.get_context("spawn")  # a forked child would share database connections and threads
    results = context.Queue()
    processes = [context.Process(target=_worker, args=(setup, results), daemon=True) for _ in range(workers)]
    try:
        for process in processes:
            process.start()
        left = workers
        while left:
            try:
                message = results.get(timeout=1)
            except queue.Empty:
                _raise_if_killed(processes)
                continue
            if isinstance(message, TrialResult):
                yield message
            elif message is None:
                left -= 1
            else:
                raise message
    finally:
        _end(processes)


@contextmanager
def interruptible() -> Iterator[None]:
    """In here Ctrl-C and SIGTERM raise `Interrupted`."""

    def handler(signum, frame):
        raise Interrupted(signal.Signals(signum).name)

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)


def _worker(setup: StudySetup, results) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with interruptible():
        try:
            for result in work(setup):
                results.put(result)
            results.put(None)
        except UserError as error:
            results.put(error)
        except Interrupted:
            results.cancel_join_thread()
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
            raise WorkerError(
                f"worker {process.pid} was killed (exit code {process.exitcode}); the same command goes on"
            )


def _end(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        with suppress(AssertionError):  # never started
            process.join(GRACE)
            process.kill()


def quiet() -> None:
    """A study prints its own progress; Lightning's tips and deprecation warnings would bury it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
