"""Runs a study from its configuration to its result, or resumes it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.summary import summarize
from lit_dps.core.atomic_write import not_written
from lit_dps.core.config import StorageConfig
from lit_dps.core.environment import KEY, SOURCES
from lit_dps.core.errors import StorageError, Unguarded
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import TrialResult
from lit_dps.engines.eligible import standard_data
from lit_dps.parallel import ranks
from lit_dps.parallel.fork_server import unguarded
from lit_dps.parallel.process import (
    INTERRUPTED,
    RESUMES,
    Interrupted,
    StopRequest,
    interruptible,
    prepare_process,
)
from lit_dps.report.no_result import NO_RESULT, ended_without_result
from lit_dps.report.publish import figures_folder, publish
from lit_dps.storage.environments import changed_environment, check_environment, keep_environment
from lit_dps.storage.header import begin_run, check_unchanged, declare, keep_noise_scale
from lit_dps.storage.k_star_trials import keep_outcomes
from lit_dps.storage.lost_study import refuse_lost
from lit_dps.storage.own_studies import remember
from lit_dps.storage.read import read_study
from lit_dps.storage.take_over import claim_report, take_over
from lit_dps.storage.urls import check_place, check_writable, ui_command, without_password
from lit_dps.study import finished
from lit_dps.study.best_of import check_best_of
from lit_dps.study.display import LEAVING, Display, at_terminal
from lit_dps.study.environment import environment_of
from lit_dps.study.failures import FAILED, AllFail, Failures
from lit_dps.study.noise import first_guess
from lit_dps.study.preflight.check import check
from lit_dps.study.progress import Progress
from lit_dps.study.quiet_timing import update_step_timing
from lit_dps.study.retrain_command import again_text
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import refuse_changed_sources, source_hashes
from lit_dps.study.workers import first_of_ranks, follow_torchrun, warm_up, work, work_in_processes
from lit_dps.tracking.client import page_address
from lit_dps.tracking.sync import MlflowSync, connect, environment_tags
from lit_dps.tracking.tracker import Tracker
from lit_dps.tracking.views import CELLS, CURVES, view_key
from lit_dps.training.checkpoint_files import clear

T = TypeVar("T")
WAITING = 4  # exit code: only trials that other processes run remain


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one run of a study.

    Attributes:
        show: Further parts of the report that are printed, as in `publish`.
        validate_every: Steps between two validations in the user's own training; None leaves
            validation out.
        time_steps: Whether to time the steps of every cell again if times are stored.
        takes_over: Whether to release the trials of processes that do not answer.
        accept_code_change: Whether to extend a study whose code or data have changed.
    """

    show: Collection[str] = ()
    validate_every: int | None = None
    time_steps: bool = False
    takes_over: bool = False
    accept_code_change: bool = False


def run_study(setup: StudySetup, options: RunOptions = RunOptions()) -> int:
    """Run the remaining trials of a study, then print and log its result.

    Under torchrun, rank 0 runs the study. The other ranks only train its trials; they use no
    storage.

    Args:
        setup: The study.
        options: Options of this run.

    Returns:
        The exit code: 0; 1 if trials failed; 3 (`NO_RESULT`) if all trials ended and none reached
        the goal; `WAITING` if only trials of other processes remain; 130 if it was interrupted. The
        same call resumes the study.

    Raises:
        UserError: if configuration, data or storage are refused, before anything is created.
    """
    if ranks.follows_torchrun():
        return follow_torchrun(setup)
    stop = StopRequest()
    with interruptible(
        stop, f"\n{LEAVING}\n"
    ):  # MLflow and Lightning lose a Ctrl-C that is raised within them
        try:
            sources = source_hashes(setup.config())
            data, is_settled = _check_study(setup)
            environment = environment_of(setup, data, reads_data=not is_settled)
            refuse_changed_sources(sources, environment[SOURCES])
            changes = _accepted_changes(setup, environment, options.accept_code_change)
            stop.check()
            starts = not ranks.started_by_torchrun() and (setup.workers > 1 or setup.ranks > 1)
            if starts and unguarded() and not is_settled:
                raise Unguarded  # here nothing is created yet; workers would refuse later
        except Interrupted as signal:
            print(f"\ninterrupted by {signal}: nothing was run or stored")
            return INTERRUPTED
        if changes:
            # Paused trials were trained by other code, so they restart.
            clear(setup.storage.checkpoints(setup.study.name))
        setup = dataclasses.replace(
            setup, environment=environment[KEY], sources=environment[SOURCES]
        )
        try:
            return _run(setup, data, environment, stop, options)
        except Interrupted as signal:
            # A second signal came while the results after the first one were counted.
            if not stop.reported:
                print(f"\ninterrupted by {signal}: {RESUMES}")
            return INTERRUPTED


def _accepted_changes(
    setup: StudySetup, environment: Mapping[str, Any], accepts: bool
) -> list[str]:
    """Return the code and data that differ from the stored study.

    Raises:
        StudyChanged: if code or data differ, unless `accepts`.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    if not accepts:
        check_environment(url, name, environment)
        return []
    changes = changed_environment(url, name, environment)
    if changes:
        verb = "is" if len(changes) == 1 else "are"
        line = f"{', '.join(changes)} {verb} not as in its stored trials, which is accepted"
        print(f"study {name}: {line}", file=sys.stderr, flush=True)
    return changes


def _run(
    setup: StudySetup,
    data: LightningDataModule,
    environment: Mapping[str, Any],
    stop: StopRequest,
    options: RunOptions,
) -> int:
    """Run the remaining trials of a checked study, and print its result. Return as `run_study`."""
    url, name, workload = setup.storage.optuna_url, setup.study.name, setup.workload_name()
    tags = environment_tags(getattr(data, "digest", None))
    identity = setup.identity(data)
    slack, uid = declare(
        url, setup.study, workload, setup.goal_of_trials, identity, setup.config(), setup.boxes
    )
    remember(uid)
    extended = dataclasses.replace(setup.study, slack=slack)
    setup = dataclasses.replace(setup, study=extended, uid=uid)
    if options.takes_over:
        for line in take_over(url, name) or ["no trial to take over"]:
            print(f"study {name}: {line}", file=sys.stderr)

    is_waiting = False
    view = MlflowSync(partial(connect, setup.storage, workload, name, tags))
    record = read_study(url, name)
    left = _left(setup, record)
    stored = chain(*record.results.values(), *record.repeats.values())
    failures = Failures(setup.storage.failures(name), stored)
    if left:
        setup = dataclasses.replace(setup, run_number=begin_run(url, name))
    code = 0
    if min(setup.workers, left) > 1:
        warm_up()
    try:
        # Other processes may store results while this one trains or waits for its ranks.
        may_have_changed = left or ranks.started_by_torchrun()
        if left:
            keep_environment(url, name, environment)
            view.sync(record, goes_on=True)  # without remaining trials, `_finish` logs everything
            stop.check()
            record = _guessed(setup, record, stop)
            _train(
                setup, record, min(setup.workers, left), stop, view.log, failures.on_result_stored
            )
        else:
            print(f"study {name}: nothing left to run", file=sys.stderr)
            if ranks.started_by_torchrun():
                with first_of_ranks(setup):  # the other ranks wait for a message
                    pass
        unstored = Unstored()
        others = None
        if left:
            others = unstored.attempt("who writes the analysis", lambda: claim_report(url, name))
        if others is not None:
            print(f"study {name}: {others.reason}")
            is_waiting = others.is_running
        else:
            seen = getattr(data, "digest", None) is None or type(data).__module__.startswith(
                "lit_dps."
            )
            if may_have_changed:
                record = read_study(url, name)
            best = [
                (cell.best.trial, cell.k_star)
                for cell in summarize(record)
                if cell.best is not None
            ]
            unstored.attempt("the best trial of each cell", lambda: keep_outcomes(url, name, best))
            if left or options.time_steps:
                record = update_step_timing(setup, record, stop, options.time_steps)
            code = _finish(setup, view, record, seen and not unstored.names, options)
            if unstored.names:
                print(f"study {name}: {unstored.sentence}", file=sys.stderr, flush=True)
    except Interrupted as signal:
        left = _left(setup, read_study(url, name))
        remaining = "1 trial remains" if left == 1 else f"{left} trials remain"
        print(
            f"\ninterrupted by {signal}: the results so far are stored, {remaining}; the same "
            "command resumes the study"
        )
        stop.reported = True
        return INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return FAILED
    summary = failures.summary()
    if summary:
        print(f"lit-dps: {summary}", file=sys.stderr)
        return FAILED
    # torchrun would report any other exit code as the crash of a rank.
    if ranks.started_by_torchrun():
        return 0
    return WAITING if is_waiting else code


class Unstored:
    """Collects errors of storing further results, so that the answer is printed in spite of them.

    Attributes:
        names: The results that could not be stored.
    """

    def __init__(self):
        self.names: list[str] = []
        self._errors: list[StorageError] = []

    def attempt(self, name: str, store: Callable[[], T]) -> T | None:
        """Call `store` and return its value; None if it raises StorageError."""
        try:
            return store()
        except StorageError as error:
            self.names.append(name)
            self._errors.append(error)
            return None

    @property
    def sentence(self) -> str:
        """A line with the names of the unstored results, and the reason."""
        return (
            f"not stored: {' and '.join(self.names)}: {self._errors[0]}; the same command stores it"
        )


def check_study(setup: StudySetup) -> LightningDataModule:
    """Check configuration, data and storage, and that a stored study can be resumed. Creates
    nothing.

    Returns:
        The data module, set up for training.

    Raises:
        UserError: if a check fails.
    """
    return _check_study(setup)[0]


def _check_study(setup: StudySetup) -> tuple[LightningDataModule, bool]:
    """Like `check_study`; also return True if the study is stored and no trials remain."""
    prepare_process()
    name = setup.study.name
    refuse_lost(setup.storage, name, figures_folder(setup.storage.folder, name))
    _say(setup, "checking it with a dry run")
    is_settled = False

    def settled(data: LightningDataModule) -> bool:
        nonlocal is_settled
        is_settled = _settled(setup, data)
        return is_settled

    data = check(setup, settled)
    for place in (setup.storage.optuna_url, setup.storage.mlflow_uri):
        check_place(place)
    check_writable(
        setup.storage.optuna_url
    )  # MLflow's storage may be unavailable; the study then runs without MLflow
    check_unchanged(
        setup.storage.optuna_url, setup.study.name, setup.identity(data), setup.study, setup.boxes
    )
    if setup.study.best_of is not None and not is_settled:
        check_best_of(setup)
    return data, is_settled


def _say(setup: StudySetup, doing: str) -> None:
    """Print at a terminal what takes the next seconds; print nothing into a log."""
    if at_terminal():
        print(f"study {setup.study.name}: {doing} ...", file=sys.stderr, flush=True)


def _settled(setup: StudySetup, data: LightningDataModule) -> bool:
    """Return True if a study is stored and no trials remain; then set up its data.

    The caller compares the stored configuration afterwards.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    check_place(url)
    try:
        record = read_study(url, name)
    except StorageError:  # usually there is no study yet; `declare` reports other errors
        return False
    if _left(setup, record):
        return False
    if standard_data(data):  # other data may need a trainer for `setup`, and have no digest
        data.prepare_data()
        data.setup("fit")
    return True


def _guessed(setup: StudySetup, record: StudyRecord, stop: StopRequest) -> StudyRecord:
    """Measure, print and store the noise scale of a study, unless it is stored or turned off."""
    if record.noise is not None or not setup.study.noise_scale:
        return record
    _say(setup, "reading its gradient noise scale")
    noise = first_guess(setup, stop.check)
    if isinstance(noise, str):
        print(
            f"study {record.name}: noise scale not measured: {noise}", file=sys.stderr, flush=True
        )
        return record
    print(f"study {record.name}: {noise.sentence}", file=sys.stderr, flush=True)
    keep_noise_scale(setup.storage.optuna_url, record.name, noise)
    return dataclasses.replace(record, noise=noise)


def _train(
    setup: StudySetup,
    record: StudyRecord,
    workers: int,
    stop: StopRequest,
    *listeners: Callable[[TrialResult], None],
) -> None:
    """Run the remaining trials, and pass each result to the listeners."""
    options = {
        "slack": setup.study.slack,
        "plan": setup.study.repeat_plan,
        "repeats": record.repeats,
    }
    progress = shown = Progress(record.results, setup.cells, setup.study.trials, workers, **options)
    if at_terminal():
        shown = Display(progress, record.name, setup.goal_of_trials, stop)
    on_event = None if shown is progress else shown.on_event
    trials = "1 trial" if workers == 1 else f"{workers} trials"
    url = without_password(setup.storage.optuna_url)
    print(f"study {record.name}: {trials} at a time in {url}", file=sys.stderr, flush=True)
    shown.show()
    results = (
        work(setup, stop, on_event)
        if workers == 1
        else work_in_processes(setup, workers, stop, on_event)
    )
    try:
        for result in results:
            for listener in (shown.update, *listeners):
                listener(result)
    finally:
        shown.close()
        results.close()


def _finish(
    setup: StudySetup, view: MlflowSync, record: StudyRecord, seen: bool, options: RunOptions
) -> int:
    """Write, log and print the result of a study.

    `finished` may store a note if all files that decide the result were `seen`.

    Returns:
        0, or `NO_RESULT` if all trials ended and none reached the goal.
    """
    storage, name = setup.storage, setup.study.name
    if not any(record.running.values()) and all(
        len(r) >= record.trials for r in record.results.values()
    ):
        clear(storage.checkpoints(name))
    analysis = Analysis(record, validate_every=options.validate_every)
    text, files = publish(analysis, figures_folder(storage.folder, name), options.show)
    view.sync(record, analysis, files)
    sys.stderr.flush()
    pages = again_text(analysis, storage) + _pages(storage, view.tracker, analysis.record.name)
    print(f"\n{text}\n{pages}", flush=True)
    if (
        seen
        and view.tracker is not None
        and not _left(setup, record)
        and not any(record.running.values())
    ):
        try:
            finished.keep(storage, record, pages)
        except StorageError as error:  # the note only saves seconds
            print(not_written(finished.NOTE, error), file=sys.stderr)
    return NO_RESULT if ended_without_result(analysis.cells) else 0


def _pages(storage: StorageConfig, tracker: Tracker | None, study: str) -> str:
    """Return the lines that say where MLflow shows the study."""
    if tracker is None:
        return "MLflow could not be used: analyze --sync logs the study once it can"
    uri = storage.mlflow_uri
    views = [view_key(study, view) for view in (CELLS, CURVES)]
    cells, curves = (page_address(uri, tracker.experiment_id, view=view) for view in views)
    return f"browse it in MLflow: {ui_command(uri)}\n  then open {cells}\n    and for K* {curves}"


def _left(setup: StudySetup, record: StudyRecord) -> int:
    """Return the number of trials and repeats of this configuration without a result, or failed."""
    return sum(map(len, setup.left(record.results).values())) + setup.repeats_left(record)
