"""What a notebook calls: `load` reads a stored study, `run` runs one as the command line does.

`study` runs a study of a module and data. `advise` gives advice for a module and data, or from
runs that exist.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_dps.cli import leave_if_unguarded
from lit_dps.cli.config_file import SECTION_CLASSES
from lit_dps.core.config import StorageConfig
from lit_dps.core.config_yaml import ConfigDumper
from lit_dps.core.errors import ConfigError, Unguarded, UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.identity import local_classes
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial_config import GoalConfig
from lit_dps.report.notebook import Study
from lit_dps.storage.read import open_elsewhere, read_study, with_changed_samples

if TYPE_CHECKING:
    import pandas as pd

    from lit_dps.advice.result import Advice


def load(study: str, storage: str | Path = "mlruns", trust: bool = False) -> Study:
    """Read a study, finished or not. Needs no PyTorch.

    Args:
        study: The name of the study.
        storage: The storage folder of the study (storage.folder), a sqlite file (.db, or compressed
            .db.xz), or an Optuna URL.
        trust: Import the modules that the study names for its goal or statistic, although
            you did not run it on this machine. They run code.

    Raises:
        StorageError: if the study does not exist, or if it needs `trust`; in one line.
    """
    if not isinstance(study, str):
        raise TypeError(f"load takes the name of a study as str, not {type(study).__name__}")
    if not isinstance(storage, (str, Path)):
        kind = type(storage).__name__
        raise TypeError(f"load takes a folder, a file or a URL as storage, not {kind}")
    place = str(storage)
    if place.endswith((".db", ".xz")) and not Path(place).is_dir():
        with open_elsewhere(place, "") as elsewhere:
            record = read_study(elsewhere.storage, study, trust)
            return Study(with_changed_samples(record, elsewhere.storage, trust))
    url = place if "://" in place else StorageConfig(folder=place).optuna_url
    record = read_study(url, study, trust)
    return Study(with_changed_samples(record, url, trust))


def run(config: str | Path | Mapping[str, Any], accept_code_change: bool = False) -> Study:
    """Run or resume a study, as `lit-dps study --config FILE` does, and read it.

    A script calls it below `if __name__ == "__main__":`, because workers may be processes that run
    the script again. Functions, and classes of the script, train in the process of the script.

    Args:
        config: A configuration file, or its content. In the content, model and data may be classes,
            functions or objects as in `advise`. A section may be an object of its class, such as
            `StudyConfig` or `GoalConfig`; its fields that differ from their defaults are set. To
            set `goal.early_reject` to false, give the section goal as a dict.
        accept_code_change: Whether to resume a study although your code or data changed since its
            trials ran.

    Returns:
        The study. Failed trials are reported on stderr.

    Raises:
        UserError: for a configuration, data or storage that cannot be used; in one line.
        SystemExit: for a script without the guard; the line is printed, and the script ends.
        KeyboardInterrupt: if the study is interrupted; its finished trials are stored.
    """
    leave_if_unguarded()
    if not isinstance(config, (str, Path, Mapping)):
        kind = type(config).__name__
        raise TypeError(f"run takes a configuration file or a dict of its keys, not {kind}")
    from lit_dps.cli import study  # imports torch and Lightning
    from lit_dps.cli.command_line import CommandLine
    from lit_dps.cli.key_checks import check_command

    text = str(config)
    if isinstance(config, Mapping):
        sections = {}
        for name, given in config.items():
            sections[name] = given
            if isinstance(given, SECTION_CLASSES.get(name, ())):
                sections[name] = _as_dict(name, given)
        text = yaml.dump(_plain(_with_class_paths(sections)), Dumper=ConfigDumper)
    options = ["--accept-code-change"] if accept_code_change else []
    command = CommandLine(["study", "--config", text, *options])
    command.warn_of_former_keys()
    try:
        check_command(command)
        code = study.main(command)
    except Unguarded as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.REFUSED) from None
    except UserError as error:
        error.args = (command.with_source(error),)
        raise
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return load(command.study_name, command.storage.optuna_url)


def _with_class_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with class paths in place of classes, functions and objects."""
    result = dict(config)
    notes = []
    for section in ("model", "data"):
        if not isinstance(config.get(section), (Mapping, str, type(None))):
            from lit_dps.training.user_objects import config_of  # imports torch and Lightning

            result[section], note = config_of(section, config[section])
            notes.append(note)
    _print_notes(notes)
    return result


def _print_notes(notes: Sequence[str]) -> None:
    for note in filter(None, notes):
        print(f"note: {note}", file=sys.stderr)


def study(
    model: Any,
    data: Any,
    goal: str | Mapping[str, Any] | GoalConfig,
    batch_sizes: Sequence[int],
    space: Mapping[str, Any],
    *,
    name: str = "study",
    sparsities: Sequence[float] = (0.0,),
    trials: int = 12,
    max_steps: int | None = None,
    check_interval: int | None = None,
    repeats: int = 0,
    seed: int = 0,
    workers: int | None = None,
    storage: str | Path | StorageConfig = "mlruns",
    accept_code_change: bool = False,
    **sections: Any,
) -> Study:
    """Run or resume a study of a module and data that exist, as `lit-dps study` does, and read it.

    It refuses what the command refuses. Trials train new objects; the weights of `model` are not
    used. The progress is on stderr; a notebook shows it in one line that is updated. A script calls
    this function below `if __name__ == "__main__":`, because workers run the script again.

    Example:
        study = lit_dps.study(
            MyModule(), MyData(), "val_loss <= 0.2", [16, 64, 256, 1024],
            {"model.lr": {"low": 1e-4, "high": 1, "scale": "log"}}, max_steps=2000,
        )
        study.cells, study.law, study.plot()

    Args:
        model: A LightningModule: its class, a partial, a function or an object, as in `advise`.
        data: A LightningDataModule, in the same ways.
        goal: The goal, such as "val_loss <= 0.2" or "val_accuracy >= 0.98", or the section goal.
        batch_sizes: Batch sizes to compare [examples of an optimizer step].
        space: What each trial draws: {KEY: {low, high, scale}} or {KEY: {choices}}; a box may be a
            `Range` or `Choices`.
        name: Name of the study. The same name and arguments resume it.
        sparsities: Shares of pruned weights to compare, in [0, 1).
        trials: Trials of each cell.
        max_steps: Most optimizer steps of a trial, as goal.max_steps.
        check_interval: Optimizer steps between two checks of the goal, as goal.check_interval.
        repeats: Repeats of the best trial of each cell, on new seeds.
        seed: Seed of the search and of all trials.
        workers: Processes that train at the same time. By default 1 on GPUs. On CPUs, the cores
            divided by the cores of a trial (`study.threads` for each of its ranks). It must be 1
            for functions, and for classes of the script or notebook: put them into a module.
        storage: The storage folder, or the section storage.
        accept_code_change: Whether to resume although your code or data changed. Compared are the
            code by names, its constants, and the first steps of a few trials; not a value in a
            dict, a list or an object that acts only later.
        sections: The sections trainer, pruning, optim, local, smoothness and batch, and further
            keys of the section study: dicts or objects such as `PruningConfig`. Fields of an object
            are set as in `run`.

    Returns:
        The study that `load` returns.

    Raises:
        UserError: for arguments, data or storage that cannot be used; in one line.
        SystemExit: for a script without the guard; the line is printed, and the script ends.
        KeyboardInterrupt: if the study is interrupted; its finished trials are stored.
    """
    leave_if_unguarded()
    _refuse_unknown(sections, _STUDY_SECTIONS)
    options = {key: _as_dict(key, value) for key, value in sections.items()}
    further = options.pop("study", {})
    _refuse_arguments(further, workers)
    workers = further.pop("workers", workers)
    config, notes = _config_of_objects(model, data, options)
    config["goal"] = _goal_section(goal)
    for key, value in (("max_steps", max_steps), ("check_interval", check_interval)):
        if value is not None:
            config["goal"][key] = value
    config["study"] |= {
        "name": name,
        "batch_sizes": list(batch_sizes),
        "sparsities": list(sparsities),
        "trials": trials,
        "repeats": repeats,
        "seed": seed,
        "space": dict(space),
        **further,
    }
    config["storage"] = {"folder": str(storage)}
    if isinstance(storage, StorageConfig):
        config["storage"] = _as_dict("storage", storage)
    if workers is not None:
        config["study"]["workers"] = workers
    _print_notes(notes)
    return run(config, accept_code_change)


# Sections of `study` beside its arguments.
_STUDY_SECTIONS = ("trainer", "pruning", "optim", "local", "smoothness", "batch", "study")
# Keys of the section study that are arguments of `study`.
_STUDY_ARGUMENTS = ("name", "batch_sizes", "sparsities", "trials", "repeats", "seed", "space")


def _refuse_arguments(further: Mapping[str, Any], workers: int | None) -> None:
    """Raise ConfigError for a key of the section study that is an argument of `study`.

    The section may set the workers, unless the argument has another value.
    """
    for key in _STUDY_ARGUMENTS:
        if key in further:
            allowed = f"omitted. Use the argument {key} of lit_dps.study"
            raise ConfigError(f"study.{key}", further[key], allowed)
    if workers is not None and further.get("workers", workers) != workers:
        allowed = f"omitted, or {workers} like the argument workers"
        raise ConfigError("study.workers", further["workers"], allowed)


def _goal_section(goal: str | Mapping[str, Any] | GoalConfig) -> dict[str, Any]:
    """Return the section of a goal."""
    from lit_dps.advice.curve_goal import read_goal

    if not isinstance(goal, str):
        return _as_dict("goal", goal)
    target = read_goal(goal)
    limit = "at_least" if target.at_least else "at_most"
    return {"metric": target.metric, limit: target.value}


def _as_dict(section: str, given: Any) -> dict[str, Any]:
    """Return a section of the configuration as a dict.

    Args:
        section: Its name.
        given: A dict, or an object of the dataclass of the section. A field of an object is set if
            it differs from its default. Other keys have the defaults of the command.
    """
    if isinstance(given, Mapping):
        return dict(given)
    cls = SECTION_CLASSES.get(section)
    if cls is None or not isinstance(given, cls):
        name = "a dict" if cls is None else f"a dict or a {cls.__name__}"
        raise ConfigError(section, type(given).__name__, name)
    keys = {}
    for each in fields(cls):
        value = getattr(given, each.name)
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if value != default:
            keys[each.name] = value
    return keys


def advise(
    model: Any,
    data: Any = None,
    goal: str | Mapping[str, Any] | None = None,
    budget: str | None = None,
    devices: Sequence[int] | None = None,
    price: float | None = None,
    **options: Any,
) -> Advice:
    """Return advice for a module and data as `lit-dps advise` does, or from runs that exist.

    A script calls it below `if __name__ == "__main__":`. Trials train in this process, one at a
    time, so classes of a notebook or script work.

    Args:
        model: A LightningModule: its class, a `functools.partial` of it, a function that makes it
            (its arguments have defaults, such as `lambda lr=1e-3: Net(MLP(), lr)`), or an object
            whose arguments are known by `save_hyperparameters` or by equal attributes. Trials make
            new ones. Or a DataFrame of runs that exist; then nothing is trained, and PyTorch is not
            needed. It has one row per run. Columns batch_size [examples of an optimizer step] and
            steps (to the goal); or step and a metric, one row per validation; a run whose last
            value is infinite has diverged. Optional columns: learning_rate; censored, 1 for a run
            that missed the goal, whose steps are a lower bound; seed; devices; step_seconds; check
            [steps between validations]; run, a name.
        data: A LightningDataModule, in the same ways. Left out beside runs.
        goal: The goal, such as "val_loss <= 0.2" or "val_accuracy >= 0.98", or the keys of the
            section goal. Of runs, the goal of loss curves.
        budget: The time that all of this may take, such as "10m". Without it `advise` plans at most
            three trainings, or five on a full device. Left out beside runs.
        devices: Numbers of devices to answer for.
        price: Price of a device-hour.
        options: Beside runs: batch_sizes to answer for, and columns, names of columns such as
            {"batch_size": "bs"}. Otherwise: method, bandwidth and latency, as options of
            the command; the sections trainer, study and storage as dicts; and name, of the study.

    Returns:
        The advice: `best` (the recommended row), `table`, `law`, `next_run`, `notes`, `text`, and
        `to_dict()`, the document of `--json`.

    Raises:
        UserError: for what cannot be used, in one line; also if all first trials fail.
        KeyboardInterrupt: if it is interrupted; what was measured is stored.
    """
    import pandas as pd

    if isinstance(model, pd.DataFrame):
        for name, value in (("data", data), ("budget", budget)):
            if value is not None:
                raise ConfigError(name, value, "omitted, because a DataFrame of runs is given")
        return _advise_on_runs(model, goal, devices, price, options)
    leave_if_unguarded()
    config, notes = _config_of_objects(model, data, options)
    if goal is not None:
        config["goal"] = _goal_section(goal)
    config["study"]["workers"] = 1
    local = local_classes(config)
    if local:
        notes.append(
            f"Only this script or notebook knows {', '.join(local)}. Before `lit-dps fit` takes "
            "fit.yaml, move the classes to a module, and write its name in fit.yaml."
        )
    words = []
    command_options = {name: options.get(name) for name in _COMMAND_OPTIONS}
    for name, value in {"budget": budget, "price": price, **command_options}.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    if devices is not None:
        words += ["--devices", ",".join(map(str, devices))]
    _print_notes(notes)
    return _advise(["advise", "--config", yaml.dump(_plain(config), Dumper=ConfigDumper), *words])


# Options of the command that are arguments of `advise`, and sections of the configuration.
_COMMAND_OPTIONS = ("method", "bandwidth", "latency")
_SECTIONS = ("trainer", "study", "storage", "optim", "local", "pruning", "batch", "smoothness")


def _advise_on_runs(
    runs: pd.DataFrame,
    goal: str | Mapping[str, Any] | None,
    devices: Sequence[int] | None,
    price: float | None,
    options: Mapping[str, Any],
) -> Advice:
    """Return advice from runs that exist."""
    from lit_dps.advice.curve_goal import read_goal
    from lit_dps.advice.existing_runs import advise_on_runs
    from lit_dps.advice.run_table import read_runs

    _refuse_unknown(options, ("batch_sizes", "columns"))
    if goal is not None and not isinstance(goal, str):
        raise ConfigError("goal", goal, 'a metric and a value, such as "val_loss <= 0.2"')
    curve_goal = None if goal is None else read_goal(goal)
    table = read_runs(runs, "runs", options.get("columns"), curve_goal)
    return advise_on_runs(table, options.get("batch_sizes"), devices, price)


def _refuse_unknown(options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name, value in options.items():
        if name not in known:
            raise ConfigError(name, value, f"one of the options {', '.join(known)}")


def _config_of_objects(
    model: Any, data: Any, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of a module and data module, and notes on what trials make."""
    from lit_dps.training.user_objects import batch_size_key, config_of

    _refuse_unknown(options, (*_COMMAND_OPTIONS, *_SECTIONS, "name"))
    model_config, model_note = config_of("model", model)
    data_config, data_note = config_of("data", data)
    config: dict[str, Any] = {"model": model_config, "data": data_config}
    for name in _SECTIONS:
        if name in options:
            config[name] = dict(options[name])
    study = {"name": options.get("name", "advice"), **config.get("study", {})}
    key = batch_size_key(data_config)
    if key is not None:
        study.setdefault("batch_size_key", key)
    config["study"] = study
    return config, [note for note in (model_note, data_note) if note]


def _advise(argv: list[str]) -> Advice:
    """Run the command `advise`, and return its advice."""
    import lit_dps.cli
    from lit_dps.cli import advise as verb  # imports torch and Lightning
    from lit_dps.cli.command_line import CommandLine
    from lit_dps.cli.key_checks import check_command

    # The budget begins now.
    lit_dps.cli.began = time.monotonic()
    command = CommandLine(argv)
    answers: list[Advice] = []
    try:
        check_command(command)
        code = verb.give_advice(command, answers)
    except UserError as error:
        error.args = (command.with_source(error),)
        raise
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if not answers:
        raise UserError(
            "all first trials failed. stderr shows the reason; correct it and call the "
            "function again."
        )
    return answers[0]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values as plain dicts, lists, numbers and texts, which YAML can represent."""
    return {key: _plain_value(value) for key, value in config.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, (Range, Choices)):
        value = asdict(value)
    if isinstance(value, Mapping):
        return _plain(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain_value(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        return value.tolist()
    return value
