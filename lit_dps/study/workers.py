"""Workers: processes that take trials from a study, train them and store the results.

If several ranks train each trial, a worker is the first rank. It takes the trials and stores the
results; the other ranks follow it.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.environment import remedy_of_constants
from lit_dps.core.errors import Unguarded, UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.trial import Status, TrialResult
from lit_dps.engines.trial_engine import TrialEngine
from lit_dps.engines.trial_settings import NextAttempt, RaiseIfStopped
from lit_dps.parallel import fork_server as processes
from lit_dps.parallel import launch, ranks
from lit_dps.parallel.gpus import worker_environment
from lit_dps.parallel.process import (
    RESUMES,
    Interrupted,
    StopRequest,
    defer_signals,
    interruptible,
    is_lost_loader_worker,
    prepare_process,
)
from lit_dps.storage.header import seed_of_trials
from lit_dps.storage.samplers import make_sampler
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.progress_event import ProgressEvent, ProgressReporter
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import (
    changed_code,
    import_sources,
    refuse_changed_sources,
    source_hashes,
)

SIGNAL_SECONDS = 0.2  # a signal to several processes reaches all of them within this time
GRACE_SECONDS = 20  # that a worker has to finish its validation when another worker failed
RECEIVE_SECONDS = 1  # between two checks whether a stop was requested
EventListener = Callable[[ProgressEvent], None]
Results = Generator[TrialResult, None, None]


class WorkerError(RuntimeError):
    """A worker failed; the message is its traceback."""


class WorkerDied(UserError):
    """A worker was killed.

    Attributes:
        exit_code: The negative number of the signal if a signal killed it.
    """

    def __init__(self, pid: int, exit_code: int):
        super().__init__(f"worker {pid} was killed (exit code {exit_code}); {RESUMES}")
        self.pid = pid
        self.exit_code = exit_code


def train_remaining(
    setup: StudySetup, workers: int, stop: StopRequest, on_event: EventListener | None = None
) -> Results:
    """Train the remaining trials of a study, and yield each result once it is stored.

    Args:
        setup: The study, as `declare.open_run` returns it.
        workers: The number of processes; 1 trains in this process.
        stop: A request to stop. It may depend on the time.
        on_event: Called with the progress of the running trials.

    Raises:
        Interrupted, UserError, WorkerDied, WorkerError: see `work` and `work_in_processes`.
    """
    if workers == 1:
        return work(setup, stop, on_event)
    return work_in_processes(setup, workers, stop, on_event)


def work(setup: StudySetup, stop: StopRequest, on_event: EventListener | None = None) -> Results:
    """Train trials of the study in this process until none remains, and yield their results.

    Each result is stored before it is yielded.

    Args:
        setup: The study.
        stop: A request to stop.
        on_event: Called with the progress of the running trials.

    Raises:
        Interrupted: after a validation or a trial, if `stop` was requested. The trial is released.
        RankLost: if another rank died. The trial is released.
    """
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    queue = _open_queue(setup)
    next_attempt = queue.claim_next
    if on_event is not None:
        next_attempt = partial(_claim_and_report, queue, ProgressReporter(on_event))
    checkpoints = setup.checkpoints()
    engine = setup.engine(checkpoints)
    try:
        results = train_on_ranks(setup, engine, next_attempt, make_stop_check(stop))
        with closing(results):
            for result in results:
                if result.status == Status.FAILED and is_lost_loader_worker(result.failure):
                    # The signal that ended the loader's process may be on its way to this one.
                    time.sleep(SIGNAL_SECONDS)
                    stop.raise_if_requested()
                result = queue.store_result(result)
                if checkpoints is not None:
                    checkpoints.remove_unneeded(result, queue.trial_race_limit(result.trial))
                yield result
                stop.raise_if_requested()
    finally:
        queue.leave()


def _open_queue(setup: StudySetup) -> TrialQueue:
    """Return the queue of a study's trials in its storage."""
    study = setup.study
    url = setup.storage.optuna_url
    return TrialQueue(
        url,
        study.name,
        setup.cells,
        study.trials,
        make_sampler(
            study, setup.built_goal, setup.spaces, setup.given_points, setup.trusts_best_of
        ),
        seed_of_trials(url, study),
        setup.attempt_rules,
        study.race_factor,
        uid=setup.uid,
        run_number=setup.run_number,
        repeat_plan=study.repeat_plan,
        environment=setup.environment.key,
        statistic=study.k_star_statistic,
        cost_limit=setup.cost_limit,
    )


def _claim_and_report(queue: TrialQueue, reporter: ProgressReporter) -> Attempt | None:
    """Claim the next attempt, and report its progress from now on; None if none remains."""
    attempt = queue.claim_next()
    if attempt is not None:
        reporter.watch(attempt)
    return attempt


def warm_up() -> None:
    """Begin to import what `work_in_processes` needs, in the process that starts workers."""
    processes.start_server(_worker)


def work_in_processes(
    setup: StudySetup, workers: int, stop: StopRequest, on_event: EventListener | None = None
) -> Results:
    """Train trials in several processes, and yield their results as they come.

    If a worker is killed, for example because memory is short, the others train the remaining
    trials.

    Args:
        setup: The study.
        workers: The number of processes.
        stop: A request to stop.
        on_event: Called with the progress of the running trials.

    Raises:
        Interrupted: if this process was asked to stop; or if a worker was, and trials remain.
        UserError: if a worker raised it.
        WorkerDied: if a worker was killed, and trials remain after all workers have ended.
        WorkerError: if a worker failed otherwise. The others finish their validation and release
            their trials.
    """
    pool = _WorkerPool(setup, on_event)
    try:
        for number in range(workers):
            pool.start_worker(number)
        while pool.running:
            if stop:
                pool.leaving.set()
            yield from pool.receive_results()
        stop.raise_if_requested()
        # The other workers may have ended before this error, because its worker had the last trial.
        if pool.last_error is not None and _trials_remain(setup):
            raise pool.last_error
    finally:
        pool.leaving.set()
        pool.end(0.0 if stop.now else GRACE_SECONDS)


def _trials_remain(setup: StudySetup) -> bool:
    """Return True if a worker that started now would find a trial to train."""
    queue = _open_queue(setup)
    try:
        return queue.claim_next() is not None
    finally:
        queue.leave()


class _WorkerPool:
    """The processes that train the trials of a study, and the messages that they send.

    Args:
        setup: The study.
        on_event: Called with the progress of the running trials.

    Attributes:
        leaving: Set to ask all workers to stop after their next validation.
        running: The workers that have not ended, by the connection to each.
        last_error: The last error that ended a worker without ending the study.
    """

    def __init__(self, setup: StudySetup, on_event: EventListener | None):
        self.leaving = processes.context().Event()
        self.running: dict[Any, BaseProcess] = {}
        self.last_error: BaseException | None = None
        self._setup = setup
        self._on_event = on_event
        self._started: list[BaseProcess] = []

    def start_worker(self, number: int) -> None:
        """Start a worker.

        Each worker has a pipe. If a worker is killed, it cannot hold the lock of a shared queue.
        """
        receiver, sender = processes.context().Pipe(duplex=False)
        reports_progress = self._on_event is not None
        setup = self._setup
        arguments = (setup, sender, self.leaving, reports_progress)
        environment = worker_environment(number, setup.ranks, setup.workload.trainer)
        # A signal in between would leave a process that is never ended. It would print a traceback
        # once this process has ended.
        with defer_signals():
            worker = processes.start(_worker, f"worker {number}", arguments, environment)
            self._started.append(worker)
            self.running[receiver] = worker
        sender.close()  # otherwise the end of the worker would not be seen

    def receive_results(self) -> Iterator[TrialResult]:
        """Wait for messages for at most `RECEIVE_SECONDS`, and yield the results among them.

        Raises:
            Exception: The error that ended a worker, unless it was killed or asked to stop.
        """
        for receiver in wait(list(self.running), timeout=RECEIVE_SECONDS):
            message = _receive(receiver, self.running[receiver])
            if isinstance(message, TrialResult):
                yield message
            elif isinstance(message, ProgressEvent):
                if self._on_event is not None:
                    self._on_event(message)
            else:
                # Any other message is the last one of its worker.
                worker = self.running.pop(receiver)
                self._on_worker_ended(worker, message)

    def _on_worker_ended(self, worker: BaseProcess, error: BaseException | None) -> None:
        """Note why a worker ended: None if no trial remains, else the error that ended it."""
        if error is None:
            return
        self.last_error = error
        if isinstance(error, WorkerDied):
            print(f"\nwarning: {error}", file=sys.stderr)
            if self._on_event is not None:
                self._on_event(ProgressEvent(worker.pid))
        elif not isinstance(error, Interrupted):
            raise error

    def end(self, grace_seconds: float) -> None:
        """Wait for all workers to end, and kill those that need longer than `grace_seconds`."""
        end = time.monotonic() + grace_seconds
        for worker in self._started:
            worker.join(max(0.0, end - time.monotonic()))
            worker.kill()


def _receive(receiver: Any, worker: BaseProcess) -> Any:
    """Return the next message of a worker; an error if the worker has ended without one."""
    try:
        return receiver.recv()
    except (EOFError, OSError):
        worker.join()
        if worker.exitcode == Unguarded.EXIT_CODE:
            return Unguarded()
        assert worker.pid is not None and worker.exitcode is not None  # it was started, and ended
        return WorkerDied(worker.pid, worker.exitcode)


def _worker(setup: StudySetup, sender: Connection, leaving: Event, reports_progress: bool) -> None:
    """Train trials in a process, and send results, then None or the error that ended it."""
    stop = StopRequest(leaving.is_set)

    def send(message: Any) -> None:
        try:
            sender.send(message)
        except BrokenPipeError:  # the parent was killed
            os._exit(ExitCode.FAILED)

    with interruptible(stop):
        try:
            _import_sources(setup)
            for result in work(setup, stop, send if reports_progress else None):
                send(result)
            send(None)
        except (UserError, Interrupted) as error:
            send(error)
        except Exception:  # the parent raises it, with this traceback
            send(WorkerError(traceback.format_exc()))


def train_on_ranks(
    setup: StudySetup,
    engine: TrialEngine,
    next_attempt: NextAttempt,
    raise_if_stopped: RaiseIfStopped,
) -> Results:
    """Train attempts on all ranks of a study, and yield each result; this process is the first.

    A study of one rank has no other ranks. Otherwise they are started on this machine, unless
    torchrun has started them. They `_follow` this rank until the generator is exhausted or closed.

    Args:
        setup: The study.
        engine: The engine of the study.
        next_attempt, raise_if_stopped: As in `TrialEngine.train`.

    Raises:
        RankLost: if a rank died, or refuses to train other code.
    """
    sources = setup.environment.sources
    others_train = False  # otherwise the other ranks wait for a message

    def broadcast_next() -> Attempt | None:
        nonlocal others_train
        attempt = next_attempt()
        if attempt is not None:
            ranks.broadcast((attempt.trial, sources))
            others_train = True
        return attempt

    with launch.group_of(setup.ranks, setup.on_gpu, _follow_parent, setup):
        try:
            for result in engine.train(broadcast_next, raise_if_stopped):
                others_train = False
                yield result
        finally:
            if not others_train:  # within a trial, they notice the end of this rank there
                ranks.broadcast(None)


def follow_torchrun(setup: StudySetup) -> int:
    """Train the trials of the first rank, as another rank of torchrun. Return the exit code."""
    stop = StopRequest()
    # A signal ends the process at once while it waits for the first rank, which may have refused
    # the command.
    with launch.joined_by_torchrun(setup.on_gpu), interruptible(stop):
        try:
            _follow(setup, stop)
        except Interrupted:
            return ExitCode.INTERRUPTED
    return 0


def _follow_parent(setup: StudySetup) -> None:
    """Train the trials of the first rank, in a process that the first rank started."""
    stop = StopRequest()
    with interruptible(stop), suppress(Interrupted):
        _import_sources(setup)
        _follow(setup, stop)


def _follow(setup: StudySetup, stop: StopRequest) -> None:
    """Train the trials that the first rank broadcasts, until it broadcasts None."""
    prepare_process()
    torch.set_num_threads(setup.study.threads)
    attempts = _broadcast_attempts(setup)
    engine = setup.engine(setup.checkpoints())
    for _ in engine.train(lambda: next(attempts, None), make_stop_check(stop)):
        pass


def _broadcast_attempts(setup: StudySetup) -> Iterator[Attempt]:
    """Receive the trials of the first rank, and yield an attempt at each of them."""
    is_first_trial = True
    while True:
        message: Any = ranks.broadcast(None)
        if message is None:
            return
        trial, sources = message
        if is_first_trial and ranks.started_by_torchrun():
            _refuse_other_sources(setup, sources)
        is_first_trial = False
        yield setup.attempt_rules.attempt(trial)


def make_stop_check(stop: StopRequest) -> Callable[[], None]:
    """Return a function that raises Interrupted on all ranks if one of them was asked to stop.

    All ranks call it after the same validations.
    """

    def check() -> None:
        if int(ranks.all_reduce_sum(torch.tensor(int(bool(stop))))):
            raise Interrupted(stop.signal or "another process")

    return check


def _import_sources(setup: StudySetup) -> None:
    """Import the user's code in a started process. Raise UserError if the parent has other code."""
    sources = setup.environment.sources
    import_sources(setup.config(), sources)
    refuse_changed_sources(sources, source_hashes(setup.config()))


def _refuse_other_sources(setup: StudySetup, sources: Mapping[str, Any]) -> None:
    """Raise UserError if this rank of torchrun has imported other code than the first rank."""
    changed = changed_code(sources, source_hashes(setup.config()))
    if changed:
        raise UserError(
            f"{', '.join(changed)} on rank {ranks.rank()} differs from the first rank. "
            f"Copy the same code to all machines.{remedy_of_constants(changed)}",
            value=changed,
        )
