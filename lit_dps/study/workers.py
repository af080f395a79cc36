"""Workers: processes that ask a study for trials, train them and tell the results."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from lit_dps.errors import Unguarded, UserError
from lit_dps.parallel import processes
from lit_dps.runtime import Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.store import SobolSampler, Store
from lit_dps.study.ranks import group_of, raise_if_any_rank_interrupted
from lit_dps.study.setup import StudySetup
from lit_dps.trial import TrialResult

GRACE = 20  # seconds that a worker has to finish its check and stop when another one failed


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


class WorkerDied(UserError):
    """A worker was killed."""


def work(setup: StudySetup, stop: StopRequest) -> Iterator[TrialResult]:
    """Runs trials of the study in this process until none is left, storing each result before it is yielded.

    Where several ranks train each trial this is the first of them, and starts the others unless torchrun did.

    Raises:
        Interrupted: at the end of a check or a trial, if `stop` says so. The trial is given back.
        RankLost: if another rank died. Likewise.
    """
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    config = setup.study
    sampler = SobolSampler(config.space, config.seed, config.scramble)
    url = setup.storage.optuna_url
    what = (config.name, setup.cells, config.trials, sampler, config.seed, setup.goal_of_trials, config.goals)
    store = Store(url, *what, config.slack, uid=setup.uid, began=setup.began)
    try:
        with group_of(setup) as group:
            checkpoints, at_check = setup.checkpoints(), raise_if_any_rank_interrupted(stop)
            for result in group.train(setup.engine(checkpoints), store.next_run, at_check):
                result = store.tell(result)
                if checkpoints is not None:
                    checkpoints.on_result_stored(result, store.limit(result.trial.cell))
                yield result
                stop.check()
    finally:
        store.abandon()


def warm_up() -> None:
    """Lets what `work_in_processes` needs be imported while this process does something else."""
    processes.start_server(_worker)


def work_in_processes(setup: StudySetup, workers: int, stop: StopRequest) -> Iterator[TrialResult]:
    """The same by several processes at a time; yields their results as they come.

    A worker that is killed, by the system's want of memory perhaps, or asked to leave, leaves the rest to the others.

    Raises:
        Interrupted: if this process or all of them were asked to leave.
        UserError: that a worker met.
        WorkerDied: if the last of them was killed.
        WorkerError: if a worker failed otherwise. The others finish their checks and give their trials back.
    """
    context = processes.context()
    leaving = context.Event()
    started: dict[Connection, BaseProcess] = {}  # a pipe each: a queue's lock dies with whoever was killed at it
    ended: set[type] = set()
    try:
        for number in range(workers):
            results, sent = context.Pipe(duplex=False)
            daemon = setup.ranks == 1  # a daemon may have no processes of its own
            started[results] = processes.start(_worker, f"worker {number}", (setup, sent, leaving), daemon)
            sent.close()  # else its end would never be seen
        living = dict(started)
        while living:
            if stop:
                leaving.set()
            for results in wait(list(living), timeout=1):
                message = _received(results, living[results])
                if isinstance(message, TrialResult):
                    yield message
                    continue
                del living[results]
                ended.add(type(message))
                if isinstance(message, WorkerDied):
                    print(f"\nwarning: {message}", file=sys.stderr)
                elif message is not None and not isinstance(message, Interrupted):
                    raise message
        stop.check()
        if type(None) not in ended:  # nobody found that nothing is left
            raise message
    finally:
        leaving.set()
        _end(started.values(), 0.0 if stop.now else GRACE)


def _received(results: Connection, worker: BaseProcess) -> Any:
    try:
        return results.recv()
    except (EOFError, OSError):
        worker.join()
        if worker.exitcode == Unguarded.EXIT_CODE:
            return Unguarded()
        return WorkerDied(f"worker {worker.pid} was killed (exit code {worker.exitcode}); the same command goes on")


def _worker(setup: StudySetup, results: Connection, leaving) -> None:
    stop = StopRequest(leaving.is_set)
    with interruptible(stop):
        try:
            for result in work(setup, stop):
                results.send(result)
            results.send(None)
        except (UserError, Interrupted) as error:
            results.send(error)
        except Exception:  # not swallowed: the parent raises it, with this traceback
            results.send(WorkerError(traceback.format_exc()))


def _end(started: Iterable[BaseProcess], grace: float) -> None:
    end = time.monotonic() + grace
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
