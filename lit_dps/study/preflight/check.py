"""Checks a study before anything is created: configuration, data, storage, and a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning.pytorch import LightningDataModule

from lit_dps.analysis.summary import summarize
from lit_dps.core.errors import (
    ConfigError,
    StorageError,
    first_line,
    place_in_user_code,
)
from lit_dps.core.progress_line import print_wrapped
from lit_dps.core.record import StudyRecord, remaining_points
from lit_dps.core.search_space import Box, Choices, extreme_points
from lit_dps.core.text import shorten_message
from lit_dps.core.trial import STACKED, Cell, Trial, Value, text_of
from lit_dps.engines.eligible import standard_data
from lit_dps.parallel import ddp, ranks
from lit_dps.parallel.process import prepare_process
from lit_dps.report.notes import Level
from lit_dps.report.publish import figures_folder
from lit_dps.storage.database import refuse_lost
from lit_dps.storage.header import StudyChanged, check_unchanged
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import make_sampler
from lit_dps.storage.urls import check_place, check_writable
from lit_dps.study.data_hashes import attach_trainer
from lit_dps.study.display import print_line_at_terminal
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.keys import (
    check_goals,
    check_keys,
    check_new_axes,
    check_new_metrics,
    check_readings,
    check_workers,
)
from lit_dps.study.preflight.plug_ins import check_plug_ins
from lit_dps.study.preflight.varied_trials import smallest_trials
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.trainer_rules import check_trainer, overridden_arguments

MODULE_HINT = "Put the classes and functions into a module of yours, and import it"


class CheckedStudy(NamedTuple):
    """A study that passed its checks.

    Attributes:
        data: Its data module, set up for training.
        trials_remain: Whether trials of the study remain.
        environments: The stored environments of the study.
        notes: The notes of the dry run; empty without one.
    """

    data: LightningDataModule
    trials_remain: bool
    environments: Sequence[Mapping[str, Any]] = ()
    notes: Mapping[str, Level] = {}

    @property
    def weaknesses(self) -> dict[str, str]:
        """The notes that weaken a number: the name of the level by text."""
        return {note: level.name for note, level in self.notes.items() if level < Level.INFO}


def check_study(setup: StudySetup) -> CheckedStudy:
    """Check configuration, data and storage, and that a stored study can be resumed.

    Creates nothing.

    Raises:
        UserError: if a check fails.
    """
    prepare_process()
    storage = setup.storage
    name = setup.study.name
    refuse_lost(storage, name, figures_folder(storage.folder, name))
    print_line_at_terminal(setup, "checking it with a dry run")
    check_configuration(setup)
    check_place(storage.optuna_url)
    record = _stored_record(setup)
    if record is None:
        check_new_metrics(setup)
        check_new_axes(setup)
    # The stored configuration is compared below.
    trials_remain = True
    if record is not None:
        trials_remain = setup.with_stored_trials(record).remaining_trials(record) > 0
    error = None
    if trials_remain:
        data, notes = check_with_dry_run(setup)
    else:
        data, error = set_up_data(setup)
        notes = {}
    check_place(storage.mlflow_uri)
    # MLflow's storage may be unavailable; the study then runs without MLflow.
    check_writable(storage.optuna_url)
    with explained_by(error):
        check_unchanged(storage.optuna_url, name, setup.identity(data), setup.study, setup.spaces)
    if setup.study.best_of is not None and trials_remain:
        _check_best_of(setup)
        notes |= _notes_on_best_of(setup, record)
    environments = () if record is None else record.environments
    return CheckedStudy(data, trials_remain, environments, notes)


def _check_best_of(setup: StudySetup) -> None:
    """Check that another study has a best point for each cell, within this study's ranges.

    If trials of this study are stored, they must have been run at the same points.

    Raises:
        ConfigError: if a check fails.
        StorageError: if the other study is not stored.
    """
    study = setup.study
    assert study.best_of is not None
    other = read_study(setup.storage.optuna_url, study.best_of)
    if other.space.keys() != study.space.keys():
        allowed = f"the keys of study {other.name!r}: {sorted(other.space)}"
        raise ConfigError("study.space", sorted(study.space), allowed)
    best = {summary.cell: summary.best for summary in summarize(other)}
    stored = _stored_record(setup)
    for cell in setup.cells:
        winner = best.get(cell)
        if winner is None:
            raise ConfigError(
                "study.best_of", study.best_of, f"a study with a complete trial at {cell}"
            )
        params = winner.trial.params
        _check_ranges(setup, cell, params)
        if stored is None:
            continue
        for result in stored.results.get(cell, []):
            if result.trial.params != params:
                raise ConfigError(
                    "study.best_of",
                    study.best_of,
                    f"a study whose best sample at {cell} is the sample of the stored trials",
                    hint="Choose another study.name",
                )


def _notes_on_best_of(setup: StudySetup, stored: StudyRecord | None) -> dict[str, Level]:
    """Return, and print, a note if trials of the other study may still change its best samples.

    A cell with a stored trial has its sample already.
    """
    cells = [cell for cell in setup.cells if stored is None or not stored.results.get(cell)]
    other = read_study(setup.storage.optuna_url, str(setup.study.best_of))
    points = remaining_points(cells, other.trials, other.results)
    count = sum(map(len, points.values()))
    if not count:
        return {}
    note = (
        f"Trials of study {other.name} that had not finished, or had failed, when this study took "
        f"its best samples: {count}. Another sample may be the best one. Finish study "
        f"{other.name}, then choose another study.name"
    )
    print_wrapped(f"note: {note}")
    return {note: Level.WRONG}


def _stored_record(setup: StudySetup) -> StudyRecord | None:
    """Return the stored study; None if it is not stored yet. `declare` reports other errors.

    Its trials and repeats end at the factors of this run, if these are larger than the stored ones.
    """
    study = setup.study
    try:
        return read_study(
            setup.storage.optuna_url,
            study.name,
            min_race_factor=study.race_factor,
            min_repeat_slack=study.repeat_slack,
        )
    except StorageError:
        return None


def _check_ranges(setup: StudySetup, cell: Cell, params: Mapping[str, Value]) -> None:
    """Raise ConfigError if values of another study are outside of this study's ranges."""
    for key, box in setup.study.space.items():
        if not box.contains(params[key]):
            allowed = f"{_box_with(box, params[key])}, the best value at {cell}"
            raise ConfigError(f"study.space.{key}", str(box), allowed)


def _box_with(box: Box, value: Value) -> str:
    """Return the box in words that has a value, although this box of the same key lacks it."""
    text = text_of(value)
    if isinstance(value, str) or isinstance(box, Choices):
        return f"choices that include {text}"
    if box.low <= value <= box.high:
        return f"a range without integer: true that includes {text}"
    return f"a range that includes {text}"


def check_configuration(setup: StudySetup) -> None:
    """Check keys and values of a study, and build modules at the ends of the search space.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    setup.study.check()
    if "pruning.method" not in setup.study.axes:
        PruningCallback.of(setup.pruning)
    check_goals(setup)
    make_sampler(setup.study, setup.built_goal)
    check_trainer(setup.workload.trainer)
    ddp.ranks_asked(setup.workload.trainer)  # refuses devices and strategies
    check_keys(setup)
    check_readings(setup)
    _check_engine(setup)
    if ranks.started_by_torchrun() and setup.workers > 1:
        allowed = "1 under torchrun. Start torchrun once for each worker"
        raise ConfigError("study.workers", setup.workers, allowed)
    _check_processes(setup)
    _build_at_ends(setup)


def _check_processes(setup: StudySetup) -> None:
    """Check that the classes of a script or notebook train in its process.

    Another process would run the script without its block `if __name__ == "__main__"`, which may
    set values that the classes use. Ranks of torchrun run the whole script.

    Raises:
        ConfigError: for several workers, and for ranks that start here.
    """
    if ranks.started_by_torchrun() or not setup.local_classes:
        return
    allowed = f"1, because {_named(setup.local_classes)} of this script or notebook"
    if setup.workers > 1:
        raise ConfigError("study.workers", setup.workers, allowed, MODULE_HINT)
    if setup.ranks > 1:
        devices = setup.workload.trainer.get("devices")
        hint = f"{MODULE_HINT}. Or start the script by torchrun"
        raise ConfigError("trainer.devices", devices, allowed, hint)


def _note_on_processes(setup: StudySetup) -> list[str]:
    """Return a note that other processes cannot import classes of a script or notebook."""
    names = setup.local_classes
    if not names:
        return []
    command = f"lit-dps fit --of {setup.study.name}"
    reason = f"because {_named(names)} of this script or notebook. {MODULE_HINT}"
    if setup.study.workers is None and not ranks.started_by_torchrun():
        return [f"One worker trains, {reason}, for several workers and for {command}."]
    return [f"{command} cannot retrain a trial, {reason}."]


def _named(paths: Sequence[str]) -> str:
    verb = "is" if len(paths) == 1 else "are"
    return f"{', '.join(paths)} {verb}"


def check_with_dry_run(setup: StudySetup) -> tuple[LightningDataModule, dict[str, Level]]:
    """Test plug-ins, run a study dry, and print the notes. Return as `dry_run`."""
    notes = check_plug_ins(setup)
    data, notes_of_run = dry_run(setup)
    notes += _note_on_processes(setup)
    for line in [*overridden_arguments(setup.workload.trainer), *notes, *notes_of_run]:
        print_wrapped(f"note: {line}")
    return data, notes_of_run


def set_up_data(setup: StudySetup) -> tuple[LightningDataModule, Exception | None]:
    """Return the data module of the identity of a study, set up without a dry run.

    Its arguments are those of the data module that `dry_run` returns. Data other than `ImageData`
    may need a running trainer for `setup`. If it raises an error, they are returned as far as they
    are set up, with the error if their digest is unknown. See `explained_by`.
    """
    trial = smallest_trials(setup)[-1]
    with setup.workload.without_side_effects() as workload:
        built = workload.build(trial)
        if standard_data(built.data):
            _prepare_and_set_up(built.data)
            return built.data, None
        try:
            with preserve_rng_state(seed=trial.seed_for("order")):
                attach_trainer(setup, built)
                _prepare_and_set_up(built.data)
        except Exception as error:
            if getattr(built.data, "digest", None) is None:
                return built.data, error
        return built.data, None


@contextmanager
def explained_by(error: Exception | None) -> Iterator[None]:
    """Name the error of `set_up_data` if the body refuses the data, whose digest is unknown.

    Raises:
        StudyChanged: from the error, if the stored data have a digest.
    """
    try:
        yield
    except StudyChanged as refusal:
        # Other keys that differ are named first.
        if error is None or refusal.keys != ("data_digest",):
            raise
        cause = f"{type(error).__name__}: {shorten_message(first_line(error))}"
        raise StudyChanged(
            f"the data could not be set up: {cause}{place_in_user_code(error)}. So their digest "
            "cannot be compared with the stored one. Restore the data, or choose another "
            "study.name.",
            keys=refusal.keys,
        ) from error


def _prepare_and_set_up(data: LightningDataModule) -> None:
    ranks.on_rank_zero(data.prepare_data, errors=Exception)
    data.setup("fit")


def _check_engine(setup: StudySetup) -> None:
    engine = setup.study.engine
    if engine == STACKED and setup.ranks > 1:
        allowed = f"auto, single or lightning, because {setup.ranks} ranks train each trial"
        raise ConfigError("study.engine", engine, allowed)
    if engine == STACKED and setup.built_goal.counts_seconds:
        allowed = (
            "auto, single or lightning, because goal.max_seconds or goal.unit counts "
            "seconds. The networks of a stack share their clock"
        )
        raise ConfigError("study.engine", engine, allowed)


def _build_at_ends(setup: StudySetup) -> None:
    """Build module and data of each series at the ends of the search space.

    Classes refuse values that they do not allow.
    """
    smallest = min(setup.study.batch_sizes)
    for cell in setup.study.cells:
        if cell.batch_size != smallest:
            continue
        setup.trial_settings().pruning_callback(Trial(cell, 0))
        for params in extreme_points(setup.space):
            setup.workload.build(Trial(cell, 0, params))
            check_workers(setup, cell, params)
