"""Runs a study from its configuration to its result, or resumes it.

`run_study` checks the study, declares it in the storage, trains the remaining trials in workers,
and prints, writes and logs the result. The same call resumes a study that was interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from itertools import chain

from lightning.pytorch import LightningDataModule

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.summary import summarize
from lit_dps.core.config import StorageConfig
from lit_dps.core.environment import Environment
from lit_dps.core.errors import StorageError, Unguarded
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import counted, for_terminal, terminal_width
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED
from lit_dps.engines.trial_engine import LoopChoice
from lit_dps.parallel import ranks
from lit_dps.parallel.fork_server import unguarded
from lit_dps.parallel.gpus import gpus_of_workers
from lit_dps.parallel.process import KEPT, Interrupted, StopRequest, interruptible
from lit_dps.report.no_result import ended_without_result
from lit_dps.report.publish import figures_folder, publish
from lit_dps.report.text import FILES
from lit_dps.storage.ownership import remember
from lit_dps.storage.read import read_study, with_changed_samples
from lit_dps.storage.run_records import (
    changed_environment,
    check_environment,
    forget_files,
    store_k_star_trials,
    store_noise_scale,
    store_notes,
)
from lit_dps.storage.take_over import ReportDeferred, claim_report, results_reported, take_over
from lit_dps.storage.urls import ui_hint, without_password
from lit_dps.study.declare import declare_study, mlflow_of, open_run
from lit_dps.study.display import LEAVING, Display, at_terminal, print_line, print_line_at_terminal
from lit_dps.study.environment import environment_of
from lit_dps.study.failures import AllFail, Failures
from lit_dps.study.noise import first_guess
from lit_dps.study.preflight.check import check_study
from lit_dps.study.progress import (
    SECONDS_BETWEEN_NOTEBOOK_LINES,
    Progress,
    ProgressLog,
    RunPlan,
    notebook_line,
)
from lit_dps.study.quiet_timing import update_step_timing
from lit_dps.study.retrain_hint import retrain_hint
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import refuse_changed_sources, source_hashes, written_files
from lit_dps.study.workers import follow_torchrun, train_on_ranks, train_remaining
from lit_dps.tracking.pages import CELLS, CURVES, page_address, view_key
from lit_dps.training.checkpoint_files import clear_checkpoints

# The loops that train trials, in words.
LOOPS = {
    SINGLE: "the loop of lit_dps, one network at a time",
    STACKED: "the loop of lit_dps, several networks at once",
    LIGHTNING: "Lightning's loop, slower with equal results",
}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one run of a study.

    Attributes:
        show: Further parts of the report that are printed, as in `publish`.
        validate_every: Steps between two validations in a later training of the user; None leaves
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
        The exit code: `ExitCode.FAILED` if trials failed, `NO_RESULT` if all trials ended and none
        reached the goal, `WAITING` if only trials of other processes remain, `INTERRUPTED` or
        `DONE`. The same call resumes the study.

    Raises:
        UserError: if configuration, data or storage are refused, before anything is created.
    """
    if ranks.follows_torchrun():
        return follow_torchrun(setup)
    stop = StopRequest()
    # MLflow and Lightning lose a Ctrl-C that is raised within them.
    with interruptible(stop, f"\n{LEAVING}\n"):
        try:
            run = _prepare(setup, stop, options)
        except Interrupted as signal:
            print(f"\ninterrupted by {signal}: nothing was run or stored")
            return ExitCode.INTERRUPTED
        try:
            return run.run()
        except Interrupted as signal:
            # A second signal came while the results after the first one were counted.
            if not stop.reported:
                print(f"\ninterrupted by {signal}: {KEPT}")
            return ExitCode.INTERRUPTED


def _prepare(setup: StudySetup, stop: StopRequest, options: RunOptions) -> _StudyRun:
    """Check a study and the code and data of its stored trials. Creates nothing."""
    # Hashed before anything is imported, and compared afterwards: files may change in between.
    sources = source_hashes(setup.config(), is_start=True)
    checked = check_study(setup)
    # Also if no trial remains: the stored results are no answer for other data or another model.
    environment = environment_of(setup, checked.data, stored=checked.environments)
    refuse_changed_sources(sources, environment.sources)
    # After the hashes of the code, so that an edit of a figure is no change of the study's code.
    for name in setup.study.figures:
        from lit_dps.report.figures import of_others  # imports matplotlib

        of_others(name, "study.figures")
    changes = _accepted_changes(setup, environment, options.accept_code_change)
    stop.raise_if_requested()
    if checked.trials_remain and _starts_processes(setup) and unguarded():
        raise Unguarded  # workers would refuse later, when the study is declared
    if changes:
        # Paused trials were trained by other code, so they restart.
        clear_checkpoints(setup.storage.checkpoints(setup.study.name))
    setup = dataclasses.replace(setup, environment=environment)
    return _StudyRun(setup, checked.data, stop, options, notes=checked.weaknesses)


def _starts_processes(setup: StudySetup) -> bool:
    """Return True if this process starts workers or ranks."""
    if ranks.started_by_torchrun():
        return False
    return setup.workers > 1 or setup.ranks > 1


def _accepted_changes(setup: StudySetup, environment: Environment, accepts: bool) -> list[str]:
    """Return the code and data that differ from the stored study.

    Raises:
        StudyChanged: if code or data differ, unless `accepts`.
    """
    url = setup.storage.optuna_url
    name = setup.study.name
    if not accepts:
        check_environment(url, name, environment.content)
        return []
    changes = changed_environment(url, name, environment.content)
    if changes:
        verb = "has" if len(changes) == 1 else "have"
        line = f"{', '.join(changes)} {verb} changed since the stored trials"
        print_line(setup, f"{line}; --accept-code-change accepts it")
    return changes


@dataclasses.dataclass
class _StudyRun:
    """One run of a checked study: declares it, trains what remains, publishes the result.

    Attributes:
        setup: The study.
        data: Its data module, set up.
        stop: Set by signals.
        options: Options of this run.
        reported_before: Results of the study when its last report was written.
        written: The model's files that the stored environment has as `UNKNOWN`.
        notes: Notes of the dry run that weaken a number, by text: the names of their levels.
    """

    setup: StudySetup
    data: LightningDataModule
    stop: StopRequest
    options: RunOptions
    reported_before: int | None = None
    written: set[str] = dataclasses.field(default_factory=set)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.url = self.setup.storage.optuna_url
        self.name = self.setup.study.name

    def run(self) -> int:
        """Run the study. Return the exit code, as in `run_study`."""
        self._declare()
        record = read_study(self.url, self.name)
        self.mlflow = mlflow_of(self.setup, self.data, record.workload)
        # Trials of another process may run, and its notes hold for them.
        has_trials = any(record.results.values()) or any(record.running.values())
        if self.notes or not has_trials:
            store_notes(self.url, self.name, self.notes, has_trials)
        self.setup = dataclasses.replace(self.setup, shared=record.shared)
        remaining = self.setup.remaining_trials(record)
        stored = chain(*record.results.values(), *record.repeats.values())
        failures = Failures(self.setup.storage.failures(self.name), stored)
        try:
            if remaining:
                self._train_remaining(record, remaining, failures)
            else:
                self._report_that_none_remain()
            code = self._publish(record, trained=remaining > 0)
        except Interrupted as signal:
            self._report_interruption(signal)
            return ExitCode.INTERRUPTED
        except AllFail as error:
            print(f"lit-dps: error: {error}", file=sys.stderr)
            return ExitCode.FAILED
        summary = failures.summary()
        if summary:
            print(f"lit-dps: {summary}", file=sys.stderr)
            return ExitCode.FAILED
        # torchrun would report any other exit code as the crash of a rank.
        return 0 if ranks.started_by_torchrun() else code

    def _declare(self) -> None:
        """Create the study in the storage, or extend it to this configuration."""
        self.setup = declare_study(self.setup, self.data)
        assert self.setup.uid is not None
        remember(self.setup.uid)
        if self.options.takes_over:
            for line in take_over(self.url, self.name) or ["no trial to take over"]:
                print_line(self.setup, line)

    def _train_remaining(self, record: StudyRecord, remaining: int, failures: Failures) -> None:
        """Train the remaining trials and repeats in workers."""
        self.reported_before = results_reported(self.url, self.name)
        workers = min(self.setup.workers, remaining)
        self.setup = open_run(self.setup, record, workers, self.mlflow)
        self.stop.raise_if_requested()
        self._measure_noise_scale(record)
        self._train(record, workers, failures)

    def _measure_noise_scale(self, record: StudyRecord) -> None:
        """Measure, print and store the noise scale, unless it is stored or turned off."""
        if record.noise is not None or not self.setup.study.noise_scale:
            return
        print_line_at_terminal(self.setup, "measuring the gradient noise scale")
        noise = first_guess(self.setup, self.stop.raise_if_requested)
        if isinstance(noise, str):
            print_line(self.setup, f"noise scale not measured: {noise}")
            return
        print_line(self.setup, noise.sentence)
        store_noise_scale(self.url, self.name, noise)

    def _train(self, record: StudyRecord, workers: int, failures: Failures) -> None:
        """Run workers, and pass each result to the progress display, MLflow and the failures."""
        setup = self.setup
        choices = setup.loop_choices()
        at_a_time = setup.trials_at_a_time(choices, workers, record)
        plan = RunPlan(
            {cell: setup.most_steps(cell) for cell in setup.cells},
            setup.study.trials,
            setup.study.race_factor,
            setup.study.repeat_plan,
            setup.study.k_star_statistic,
            at_a_time,
        )
        progress = Progress(plan, record.results, record.repeats)
        display: ProgressLog | Display = ProgressLog(progress)
        notebook = notebook_line()
        if notebook is not None:
            display = ProgressLog(progress, notebook, SECONDS_BETWEEN_NOTEBOOK_LINES)
        if at_terminal():
            display = Display(progress, self.name, setup.built_goal, self.stop)
        print_line(setup, describe_loops(choices))
        trials = counted(at_a_time, "trial")
        gpus = gpus_of_workers(workers, setup.ranks, setup.workload.trainer)
        if gpus > 1:
            trials += f" on {gpus} GPUs"
        print_line(setup, f"{trials} at a time; results go to {without_password(self.url)}")
        display.show()
        results = train_remaining(setup, workers, self.stop, display.on_event)
        try:
            with closing(results):
                for result in results:
                    display.update(result)
                    self.mlflow.log_result(result)
                    failures.add(result)
                    self._forget_written_files()
        finally:
            display.close()
            self._forget_written_files()

    def _forget_written_files(self) -> None:
        """Store that the model's files which changed since the command began are `UNKNOWN`."""
        written = {*written_files()} - self.written
        if written and self.setup.environment.key is not None:
            forget_files(self.url, self.name, self.setup.environment.key, written)
            self.written |= written

    def _report_that_none_remain(self) -> None:
        """Print that no trials remain, and end the other ranks of torchrun."""
        print_line(self.setup, "no trials remain")
        if ranks.started_by_torchrun():
            # The other ranks wait for a message.
            list(train_on_ranks(self.setup, self.setup.engine(), lambda: None, lambda: None))

    def _publish(self, record: StudyRecord, trained: bool) -> int:
        """Store, write, log and print the result, unless another process will do it.

        Args:
            record: The study as it was when this run began.
            trained: Whether this run trained trials.

        Returns:
            0, `ExitCode.NO_RESULT` or `ExitCode.WAITING`.
        """
        if trained:
            others = self._claim_report()
            if others is not None:
                print(f"study {self.name}: {others.reason}")
                return ExitCode.WAITING if others.is_running else 0
        # Other processes may store results while this one trains or waits for its ranks.
        if trained or ranks.started_by_torchrun():
            record = read_study(self.url, self.name)
        self._store_best_trials(record)
        if trained or self.options.time_steps:
            record = update_step_timing(self.setup, record, self.stop, self.options.time_steps)
        return self._write_and_print(record)

    def _claim_report(self) -> ReportDeferred | None:
        """Return why another process publishes the result; None if this process does."""
        try:
            return claim_report(self.url, self.name, self.reported_before)
        except StorageError as error:
            line = f"the storage did not answer ({error}), so two processes may write the report"
            print_line(self.setup, line)
            return None

    def _store_best_trials(self, record: StudyRecord) -> None:
        """Store the trial of each K*. An error of the storage does not prevent the report."""
        best = []
        for cell in summarize(record):
            if cell.best is not None:
                best.append((cell.best.trial, cell.k_star))
        try:
            store_k_star_trials(self.url, self.name, best)
        except StorageError as error:
            line = (
                f"the best trial of each cell could not be stored ({error}). Run the same "
                "command to store it."
            )
            print_line(self.setup, line)

    def _write_and_print(self, record: StudyRecord) -> int:
        """Write, log and print the result of a study.

        Returns:
            0, or `ExitCode.NO_RESULT` if all trials ended and none reached the goal.
        """
        storage = self.setup.storage
        is_running = any([*record.running.values(), *record.running_repeats.values()])
        if not is_running and all(len(r) >= record.trials for r in record.results.values()):
            clear_checkpoints(storage.checkpoints(self.name))
        record = with_changed_samples(record, self.url, self.setup.trusts_best_of)
        analysis = Analysis(record, validate_every=self.options.validate_every)
        folder = figures_folder(storage.folder, self.name)
        show = self.options.show
        figures = self.setup.study.figures
        ui = ui_hint(storage.mlflow_uri)
        text, files = publish(analysis, folder, show, figures, terminal_width(), ui)
        self.mlflow.sync(record, analysis, files)
        sys.stderr.flush()
        lines = _mlflow_lines(storage, self.mlflow.experiment_id, self.name, FILES in show)
        print(f"\n{text}{lines}{retrain_hint(analysis, storage)}", end="", flush=True)
        return ExitCode.NO_RESULT if ended_without_result(analysis.cells) else 0

    def _report_interruption(self, signal: Interrupted) -> None:
        """Print how many trials remain after a signal."""
        remaining = self.setup.remaining_trials(read_study(self.url, self.name))
        trials = "1 trial remains" if remaining == 1 else f"{remaining} trials remain"
        action = "resumes the study" if remaining else "prints the result"
        message = (
            f"interrupted by {signal}: the results so far are stored, {trials}; the same "
            f"command {action}"
        )
        print(f"\n{for_terminal(message)}")
        self.stop.reported = True


def _mlflow_lines(
    storage: StorageConfig, experiment_id: str | None, study: str, with_pages: bool
) -> str:
    """Return the addresses at which MLflow shows the study, or that it could not be used.

    Args:
        storage: Where the study is kept.
        experiment_id: Of MLflow; None if MLflow could not be used.
        study: Its name.
        with_pages: Whether to include the addresses, which are long.
    """
    if experiment_id is None:
        return "MLflow could not be used: lit-dps analyze --sync logs the study once it can\n"
    lines = []
    if with_pages:
        for name, view in (("cells", CELLS), ("curves of K*", CURVES)):
            address = page_address(storage.mlflow_uri, experiment_id, view=view_key(study, view))
            lines.append(f"MLflow, {name}: {address}\n")
    return "".join(lines)


def describe_loops(choices: Sequence[LoopChoice]) -> str:
    """Return which loop trains the trials, with the number of cells if loops differ.

    Args:
        choices: The loop of each cell. Results store the loop of each trial.
    """
    counts = Counter(choices)
    if len(counts) == 1:
        return f"training with {_describe_loop(choices[0])}"
    parts = []
    for choice, cells in counts.most_common():
        parts.append(f"{cells} cells with {_describe_loop(choice)}")
    return f"training {'; '.join(parts)}"


def _describe_loop(choice: LoopChoice) -> str:
    """Return the name and the description of a loop, and why it is not a faster one."""
    text = f"engine {choice.engine} ({LOOPS[choice.engine]})"
    if choice.reason:
        text += f", because {choice.reason}"
    return text
