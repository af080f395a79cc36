"""Workers: processes that ask a study for trials, train them and tell the results.

Where several ranks train each trial, a worker is the first of them: it asks and tells, the others
train with it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import Unguarded, UserError
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.engines.engine import Engine
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel import launch, ranks
from lit_dps.parallel.process import (
    INTERRUPTED,
    Interrupted,
    StopRequest,
    interruptible,
    is_lost_loader_worker,
    prepare_process,
)
from lit_dps.storage.header import seed_of_trials
from lit_dps.storage.samplers import sampler_of
from lit_dps.storage.trial_queue import Store
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import (
    changed_files,
    import_sources,
    refuse_changed_sources,
    source_hashes,
)
from lit_dps.study.worker_events import ProgressEvent, ProgressReporter

SIGNAL_SECONDS = 0.2  # a signal to several processes reaches all of them within this time
GRACE = 20  # seconds that a worker has to finish its check and stop when another one failed


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


class WorkerDied(UserError):
    """A worker was killed.

    Attributes:
        exit_code: The negative number of the signal if a signal killed it.
    """

    def __init__(self, pid: int, exit_code: int):
        super().__init__(
            f"worker {pid} was killed (exit code {exit_code}); the same command resumes the study"
        )
        self.pid, self.exit_code = pid, exit_code


Saw = (
    Callable[[ProgressEvent], None] | None
)  # takes what is seen of the trials that run; None where nobody watches


def work(setup: StudySetup, stop: StopRequest, on_event: Saw = None) -> Iterator[TrialResult]:
    """Runs trials of the study in this process until none is left, storing each result before it is
    yielded.

    Raises:
        Interrupted: at the end of a check or a trial, if `stop` says so. The trial is given back.
        RankLost: if another rank died. Likewise.
    """
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    config = setup.study
    sampler = sampler_of(config, setup.goal_of_trials, setup.boxes)
    url = setup.storage.optuna_url
    seed = seed_of_trials(url, config)
    what = (
        config.name,
        setup.cells,
        config.trials,
        sampler,
        seed,
        setup.goal_of_trials,
        config.goals,
    )
    asked = {"run_on": config.run_on, "metrics": config.metrics, "plan": config.repeat_plan}
    asked["environment"] = setup.environment
    store = Store(url, *what, config.slack, uid=setup.uid, run_number=setup.run_number, **asked)
    lookout = None if on_event is None else ProgressReporter(on_event)

    def next_run() -> Attempt | None:
        run = store.next_run()
        if lookout is not None and run is not None:
            lookout.begins(run)
        return run

    try:
        with first_of_ranks(setup) as train:
            checkpoints, at_check = setup.checkpoints(), raise_if_any_rank_interrupted(stop)
            for result in train(setup.engine(checkpoints), next_run, at_check):
                if result.status == Status.FAILED and is_lost_loader_worker(result.failure):
                    time.sleep(SIGNAL_SECONDS)
                    stop.check()
                result = store.tell(result)
                if checkpoints is not None:
                    checkpoints.on_result_stored(result, store.limit_of(result.trial))
                yield result
                stop.check()
    finally:
        store.leave()


def warm_up() -> None:
    """Lets what `work_in_processes` needs be imported while this process does something else."""
    processes.start_server(_worker)


def work_in_processes(
    setup: StudySetup, workers: int, stop: StopRequest, on_event: Saw = None
) -> Iterator[TrialResult]:
    """The same by several processes at a time; yields their results as they come.

    A worker that is killed, by the system's want of memory perhaps, or asked to leave, leaves the
    rest to the others.

    Raises:
        Interrupted: if this process or all of them were asked to leave.
        UserError: that a worker met.
        WorkerDied: if the last of them was killed.
        WorkerError: if a worker failed otherwise. The others finish their checks and give their
            trials back.
    """
    context = processes.context()
    leaving = context.Event()
    started: dict[
        Connection, BaseProcess
    ] = {}  # a pipe each: a queue's lock dies with whoever was killed at it
    ended: set[type] = set()
    try:
        for number in range(workers):
            results, sent = context.Pipe(duplex=False)
            args = setup, sent, leaving, on_event is not None
            started[results] = processes.start(_worker, f"worker {number}", args)
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
                if isinstance(message, ProgressEvent):
                    on_event(message)
                    continue
                worker = living.pop(results).pid
                ended.add(type(message))
                if isinstance(message, WorkerDied):
                    print(f"\nwarning: {message}", file=sys.stderr)
                    if on_event is not None:
                        on_event(ProgressEvent(worker))
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
        return WorkerDied(worker.pid, worker.exitcode)


def _worker(setup: StudySetup, results: Connection, leaving, watched: bool) -> None:
    stop = StopRequest(leaving.is_set)

    def send(message: Any) -> None:
        try:
            results.send(message)
        except BrokenPipeError:  # the parent was killed
            os._exit(1)

    with interruptible(stop):
        try:
            _import_sources(setup)
            for result in work(setup, stop, send if watched else None):
                send(result)
            send(None)
        except (UserError, Interrupted) as error:
            send(error)
        except Exception:  # not swallowed: the parent raises it, with this traceback
            send(WorkerError(traceback.format_exc()))


def _end(started: Iterable[BaseProcess], grace: float) -> None:
    end = time.monotonic() + grace
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()


@contextmanager
def first_of_ranks(setup: StudySetup) -> Iterator[Callable[..., Iterator[TrialResult]]]:
    """In here this process is the first of the ranks that train the trials of a study; it may be
    the only one.

    Starts the others on this machine, unless torchrun has started them. Gives what trains as
    `Engine.train` does, with the engine as the first argument, each run by all ranks.

    Raises:
        RankLost: if one of them died.
    """
    told = False  # whether the others train a trial; else they wait to be told one

    def train(
        engine: Engine, next_run: Callable[[], Attempt | None], at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        nonlocal told

        def next_told() -> Attempt | None:
            nonlocal told
            if (run := next_run()) is not None:
                ranks.broadcast((run.trial, dict(setup.sources)))
                told = True
            return run

        for result in engine.train(next_told, at_check):
            told = False
            yield result

    with launch.group_of(setup.ranks, setup.on_gpu, _follow_parent, setup):
        try:
            yield train
        finally:
            if not told:  # within a trial they find out there that there is none any more
                ranks.broadcast(None)


def follow_torchrun(setup: StudySetup) -> int:
    """Trains what the first rank says, as another of torchrun's ranks. Returns the exit code."""
    stop = StopRequest()
    # a signal while it waits for the first rank, which may have refused the command, ends it at
    # once
    with launch.joined_by_torchrun(setup.on_gpu), interruptible(stop):
        try:
            _follow(setup, stop)
        except Interrupted:
            return INTERRUPTED
    return 0


def raise_if_any_rank_interrupted(stop: StopRequest) -> Callable[[], None]:
    """Raises Interrupted on all ranks if one of them was asked to stop; all ask at the same
    checks."""

    def check() -> None:
        if int(ranks.all_reduce_sum(torch.tensor(int(bool(stop))))):
            raise Interrupted(stop.signal or "another process")

    return check


def _import_sources(setup: StudySetup) -> None:
    """Import the user's code. Raises UserError if it is not the code of the environment of this
    run."""
    import_sources(setup.config(), setup.sources)
    refuse_changed_sources(setup.sources, source_hashes(setup.config()))


def _refuse_other_sources(setup: StudySetup, sources: Mapping[str, Any]) -> None:
    """Raise UserError if this rank of torchrun has imported other code than the first rank."""
    others = changed_files(sources, source_hashes(setup.config()))
    if others:
        raise UserError(
            f"{', '.join(others)} on rank {ranks.rank()} is not as on the first rank: all "
            "machines need the same code"
        )


def _follow_parent(setup: StudySetup) -> None:
    stop = StopRequest()
    try:
        _import_sources(setup)
    except UserError as error:  # the first rank finds this one lost, and does not know why
        print(f"lit-dps: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    with interruptible(stop), suppress(Interrupted):
        _follow(setup, stop)


def _follow(setup: StudySetup, stop: StopRequest) -> None:
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    trials: list[Trial] = []

    def next_run() -> Attempt | None:
        message = ranks.broadcast(None)
        if message is None:
            return None
        trial, sources = message
        if not trials and ranks.started_by_torchrun():
            _refuse_other_sources(setup, sources)
        trials.append(trial)
        own = setup.goal_of_trials, setup.study.goals
        return Attempt(
            trial, *own, run_on=setup.study.run_on and not trial.repeat, metrics=setup.study.metrics
        )

    for _ in setup.engine(setup.checkpoints()).train(next_run, raise_if_any_rank_interrupted(stop)):
        pass
