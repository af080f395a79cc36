"""Runs a study from its configuration to its result, or takes it up where it stopped."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule

from lit_dps.analysis import NO_RESULT, Analysis, ended_without_result, figures_folder, publish, summarize
from lit_dps.config import StorageConfig
from lit_dps.engines.eligible import standard_data
from lit_dps.errors import StorageError, Unguarded
from lit_dps.files import not_written
from lit_dps.parallel import ranks
from lit_dps.parallel.processes import unguarded
from lit_dps.provenance import KEY, SOURCES
from lit_dps.record import StudyRecord
from lit_dps.runtime import INTERRUPTED, RESUMES, Interrupted, StopRequest, interruptible, prepare_process
from lit_dps.store import (
    CELLS,
    CURVES,
    Tracker,
    begin_run,
    changed_environment,
    check_environment,
    check_place,
    check_unchanged,
    check_writable,
    claim_report,
    declare,
    keep_environment,
    keep_noise_scale,
    keep_outcomes,
    page_address,
    read_study,
    refuse_lost,
    remember,
    take_over,
    ui_command,
    view_key,
    without_password,
)
from lit_dps.study import finished
from lit_dps.study.best_of import check_best_of
from lit_dps.study.checks import check
from lit_dps.study.command import again_text
from lit_dps.study.display import LEAVING, Display, at_terminal
from lit_dps.study.environment import environment_of
from lit_dps.study.failures import FAILED, AllFail, Failures
from lit_dps.study.noise import first_guess
from lit_dps.study.progress import Progress
from lit_dps.study.quiet_timing import update_step_timing
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import refuse_changed_sources, source_hashes
from lit_dps.study.view import View, connect, environment_tags
from lit_dps.study.workers import first_of_ranks, follow_torchrun, warm_up, work, work_in_processes
from lit_dps.training.checkpoints import clear
from lit_dps.trial import TrialResult

T = TypeVar("T")
WAITING = 4  # exit code: only trials that other processes run remain


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a study prints at its end, and what it does once on request.

    Attributes:
        show: Further parts of the report, as `publish` takes them.
        validate_every: Steps between two validations in the user's own training; None leaves validation out.
        time_steps: Time the steps of every cell again, although times are stored.
        takes_over: Release the trials of processes that do not answer.
        accept_code_change: Extend the study with other code or data than its trials ran with.
    """

    show: Collection[str] = ()
    validate_every: int | None = None
    time_steps: bool = False
    takes_over: bool = False
    accept_code_change: bool = False


def run_study(setup: StudySetup, options: RunOptions = RunOptions()) -> int:
    """Runs what is left of a study, then prints and logs its result.

    Under torchrun rank 0 does; the others train its trials with it, and know of no storage.

    Args:
        setup: The study.
        options: What to print of it, and what to do once on request.

    Returns:
        The exit code: 0; 1 if trials failed; 3 (`NO_RESULT`) if all trials ended and none reached the goal;
        `WAITING` if only trials of other processes remain; 130 if it was interrupted. The same call resumes the study.

    Raises:
        UserError: for configuration, data or storage that do not serve, before anything is created.
    """
    if ranks.follows_torchrun():
        return follow_torchrun(setup)
    stop = StopRequest()
    with interruptible(stop, f"\n{LEAVING}\n"):  # MLflow and Lightning lose a Ctrl-C that is raised within them
        try:
            sources = source_hashes(setup.config())
            data, is_settled = _check_study(setup)
            environment = environment_of(setup, data, reads_data=not is_settled)
            refuse_changed_sources(sources, environment[SOURCES])
            changes = _accepted_changes(setup, environment, options.accept_code_change)
            stop.check()
            starts = not ranks.started_by_torchrun() and (setup.workers > 1 or setup.ranks > 1)
            if starts and unguarded() and not is_settled:
                raise Unguarded  # before anything is created; else the processes that run the script again say so
        except Interrupted as signal:
            print(f"\ninterrupted by {signal}: nothing was run or stored")
            return INTERRUPTED
        if changes:
            # Trials that paused were trained by other code: they begin again
            clear(setup.storage.checkpoints(setup.study.name))
        setup = dataclasses.replace(setup, environment=environment[KEY], sources=environment[SOURCES])
        try:
            return _run(setup, data, environment, stop, options)
        except Interrupted as signal:
            # A second signal, while the first one's outcome was counted.
            if not stop.reported:
                print(f"\ninterrupted by {signal}: {RESUMES}")
            return INTERRUPTED


def _accepted_changes(setup: StudySetup, environment: Mapping[str, Any], accepts: bool) -> list[str]:
    """Return what of code and data differs from the stored study. Raises StudyChanged unless that is accepted."""
    url, name = setup.storage.optuna_url, setup.study.name
    if not accepts:
        check_environment(url, name, environment)
        return []
    changes = changed_environment(url, name, environment)
    if changes:
        verb = "is" if len(changes) == 1 else "are"
        said = f"{', '.join(changes)} {verb} not as in its stored trials, which is accepted"
        print(f"study {name}: {said}", file=sys.stderr, flush=True)
    return changes


def _run(
    setup: StudySetup,
    data: LightningDataModule,
    environment: Mapping[str, Any],
    stop: StopRequest,
    options: RunOptions,
) -> int:
    """Runs what is left of a study that was checked, and ends it."""
    url, name, workload = setup.storage.optuna_url, setup.study.name, setup.workload_name()
    tags = environment_tags(getattr(data, "digest", None))
    identity = setup.identity(data)
    slack, uid = declare(url, setup.study, workload, setup.goal_of_trials, identity, setup.config(), setup.boxes)
    remember(uid)
    extended = dataclasses.replace(setup.study, slack=slack)
    setup = dataclasses.replace(setup, study=extended, uid=uid)
    if options.takes_over:
        for line in take_over(url, name) or ["no trial to take over"]:
            print(f"study {name}: {line}", file=sys.stderr)

    is_waiting = False
    view = View(partial(connect, setup.storage, workload, name, tags))
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
        meanwhile = left or ranks.started_by_torchrun()  # time in which others may have stored results
        if left:
            keep_environment(url, name, environment)
            view.sync(record, goes_on=True)  # where nothing is left `_finish` brings all of it in step
            stop.check()
            record = _guessed(setup, record, stop)
            _train(setup, record, min(setup.workers, left), stop, view.log, failures.on_result_stored)
        else:
            print(f"study {name}: nothing left to run", file=sys.stderr)
            if ranks.started_by_torchrun():
                with first_of_ranks(setup):  # the others wait to be told
                    pass
        unstored = Unstored()
        others = None
        if left:
            others = unstored.attempt("who writes the analysis", lambda: claim_report(url, name))
        if others is not None:
            print(f"study {name}: {others.reason}")
            is_waiting = others.is_running
        else:
            seen = getattr(data, "digest", None) is None or type(data).__module__.startswith("lit_dps.")
            if meanwhile:
                record = read_study(url, name)
            best = [(cell.best.trial, cell.k_star) for cell in summarize(record) if cell.best is not None]
            unstored.attempt("the best trial of each cell", lambda: keep_outcomes(url, name, best))
            if left or options.time_steps:
                record = update_step_timing(setup, record, stop, options.time_steps)
            code = _finish(setup, view, record, seen and not unstored.names, options)
            if unstored.names:
                print(f"study {name}: {unstored.sentence}", file=sys.stderr, flush=True)
    except Interrupted as signal:
        left = _left(setup, read_study(url, name))
        print(f"\ninterrupted by {signal}: {left} trials are left, the others are stored; the same command goes on")
        stop.reported = True
        return INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return FAILED
    if failed := failures.summary():
        print(f"lit-dps: {failed}", file=sys.stderr)
        return FAILED
    # torchrun would report any other exit code as the crash of a rank.
    if ranks.started_by_torchrun():
        return 0
    return WAITING if is_waiting else code


class Unstored:
    """Notes what cannot be stored beside the trials, so that the answer is printed without it.

    Attributes:
        names: What could not be stored.
    """

    def __init__(self):
        self.names: list[str] = []
        self._errors: list[StorageError] = []

    def attempt(self, name: str, store: Callable[[], T]) -> T | None:
        """Return what a function returns that stores something; None if the storage refuses it."""
        try:
            return store()
        except StorageError as error:
            self.names.append(name)
            self._errors.append(error)
            return None

    @property
    def sentence(self) -> str:
        """The line on what is not stored, and why."""
        return f"not stored: {' and '.join(self.names)}: {self._errors[0]}; the same command stores it"


def check_study(setup: StudySetup) -> LightningDataModule:
    """Checks configuration, data and storage, and that a study that is there already may go on; creates nothing.

    Returns:
        The data module, set up for training.

    Raises:
        UserError: for what does not serve.
    """
    return _check_study(setup)[0]


def _check_study(setup: StudySetup) -> tuple[LightningDataModule, bool]:
    """As `check_study`; returns also whether a study is stored and no trial of it is left to run."""
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
    check_writable(setup.storage.optuna_url)  # MLflow's may be away: then the study goes on without
    check_unchanged(setup.storage.optuna_url, setup.study.name, setup.identity(data), setup.study, setup.boxes)
    if setup.study.best_of is not None and not is_settled:
        check_best_of(setup)
    return data, is_settled


def _say(setup: StudySetup, doing: str) -> None:
    """Tells whoever waits at a terminal what takes seconds; a log has no use for it."""
    if at_terminal():
        print(f"study {setup.study.name}: {doing} ...", file=sys.stderr, flush=True)


def _settled(setup: StudySetup, data: LightningDataModule) -> bool:
    """Whether a study is stored and no trial of it is left to run; that its configuration is this one is checked next.

    Sets the data up as far as that needs.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    check_place(url)
    try:
        record = read_study(url, name)
    except StorageError:  # there is none yet; what else is wrong with it is told where it is declared
        return False
    if _left(setup, record):
        return False
    if standard_data(data):  # else a trainer alone knows how to set it up, and it has no digest
        data.prepare_data()
        data.setup("fit")
    return True


def _guessed(setup: StudySetup, record: StudyRecord, stop: StopRequest) -> StudyRecord:
    """Tells and stores the noise scale of a study that does not know it yet, unless it is switched off."""
    if record.noise is not None or not setup.study.noise_scale:
        return record
    _say(setup, "reading its gradient noise scale")
    found = first_guess(setup, stop.check)
    if isinstance(found, str):
        print(f"study {record.name}: noise scale not measured: {found}", file=sys.stderr, flush=True)
        return record
    print(f"study {record.name}: {found.sentence}", file=sys.stderr, flush=True)
    keep_noise_scale(setup.storage.optuna_url, record.name, found)
    return dataclasses.replace(record, noise=found)


def _train(
    setup: StudySetup,
    record: StudyRecord,
    workers: int,
    stop: StopRequest,
    *listeners: Callable[[TrialResult], None],
) -> None:
    asked = {"slack": setup.study.slack, "plan": setup.study.repeat_plan, "repeats": record.repeats}
    progress = shown = Progress(record.results, setup.cells, setup.study.trials, workers, **asked)
    if at_terminal():
        shown = Display(progress, record.name, setup.goal_of_trials, stop)
    saw = None if shown is progress else shown.saw
    trials, url = "1 trial" if workers == 1 else f"{workers} trials", without_password(setup.storage.optuna_url)
    print(f"study {record.name}: {trials} at a time in {url}", file=sys.stderr, flush=True)
    shown.show()
    results = work(setup, stop, saw) if workers == 1 else work_in_processes(setup, workers, stop, saw)
    try:
        for result in results:
            for listener in (shown.update, *listeners):
                listener(result)
    finally:
        shown.close()
        results.close()


def _finish(setup: StudySetup, view: View, record: StudyRecord, seen: bool, options: RunOptions) -> int:
    """Writes, logs and prints the outcome; it may be noted if all files were `seen` that decide it.

    Returns:
        0, or `NO_RESULT` if all trials ended and none reached the goal.
    """
    storage, name = setup.storage, setup.study.name
    if not any(record.running.values()) and all(len(r) >= record.trials for r in record.results.values()):
        clear(storage.checkpoints(name))
    analysis = Analysis(record, validate_every=options.validate_every)
    text, files = publish(analysis, figures_folder(storage.folder, name), options.show)
    view.sync(record, analysis, files)
    sys.stderr.flush()
    pages = again_text(analysis, storage) + _pages(storage, view.tracker, analysis.record.name)
    print(f"\n{text}\n{pages}", flush=True)
    if seen and view.tracker is not None and not _left(setup, record) and not any(record.running.values()):
        try:
            finished.keep(storage, record, pages)
        except StorageError as error:  # the note saves seconds, no more
            print(not_written(finished.NOTE, error), file=sys.stderr)
    return NO_RESULT if ended_without_result(analysis.cells) else 0


def _pages(storage: StorageConfig, tracker: Tracker | None, study: str) -> str:
    """Where to see the study in MLflow."""
    if tracker is None:
        return "MLflow could not be used: analyze --sync logs the study once it can"
    uri = storage.mlflow_uri
    views = [view_key(study, view) for view in (CELLS, CURVES)]
    cells, curves = (page_address(uri, tracker.experiment_id, view=view) for view in views)
    return f"browse it in MLflow: {ui_command(uri)}\n  then open {cells}\n    and for K* {curves}"


def _left(setup: StudySetup, record: StudyRecord) -> int:
    """Trials and repeats of this configuration that have no result yet, or failed."""
    return sum(map(len, setup.left(record.results).values())) + setup.repeats_left(record)
