"""Checks the keys of a study, its goals and its workers, before any trial is built.

`check_effects` also finds values that have no effect. Only what a user writes is checked for that.
A stored configuration is not, because its trials are retrained as they were.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from lit_dps.analysis.readings import TABLE_COLUMNS, reserved_columns
from lit_dps.core.batch_schedule import CONSTANT, NAME_KEY, NO_RATE_RULE, OPTIONS_KEY, RATE_KEY
from lit_dps.core.config import MAX_STEPS
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import RESERVED_NAMES
from lit_dps.core.idle_axes import fixed_value, idle_axes, keys_that_are_off
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Trial, Value, text_of
from lit_dps.core.trial_config import AVERAGE_KEY, BatchConfig
from lit_dps.core.unit import STEPS
from lit_dps.engines.trial_settings import METHOD_OPTIONS, takes_option
from lit_dps.optim import BUILT_IN, rule_named
from lit_dps.pruning import pruner_of
from lit_dps.pruning.from_file import PATH_KEY
from lit_dps.readings.reading import KEY as READINGS_KEY
from lit_dps.readings.registry import READINGS
from lit_dps.study.identity import BATCH_SIZE_KEY, GRID, SPACE, keys_of_trials
from lit_dps.study.setup import StudySetup
from lit_dps.training.trainer_rules import ACCUMULATION_KEY, check_accumulation
from lit_dps.training.workload import locate

LOCAL_KEYS = [f"local.{field.name}" for field in dataclasses.fields(LocalSGDSchedule)]
# Pruning uses the seed of the point, so the seed is no axis.
PRUNING_KEYS = ["pruning.method", "pruning.init", "pruning.biases", "pruning.batch_size"]
DELAY_KEY = "optim.delay"
OPTIM_KEYS = (DELAY_KEY, AVERAGE_KEY)
BATCH_OPTIONS = f"{OPTIONS_KEY}."
BATCH_KEYS = (NAME_KEY, RATE_KEY)
# Arguments of the trainer that change an update and nothing else.
TRAINER_KEYS = [
    ACCUMULATION_KEY,
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.precision",
]


def check_goals(setup: StudySetup) -> None:
    """Raise ConfigError for a goal or a metric that the runs of a study cannot answer."""
    goal = setup.built_goal
    if goal.max_steps > MAX_STEPS:
        raise ConfigError("goal.max_steps", goal.max_steps, f"at most {MAX_STEPS} steps")
    for name in setup.study.metrics:
        if name in (goal.metric, *RESERVED_NAMES, *goal.counted):
            raise ConfigError(
                "study.metrics", name, "another metric, because this one is always stored"
            )
    for value in setup.study.goals:
        if not goal.is_easier(value) and not setup.study.train_past_goal:
            side = "below" if goal.at_least else "above"
            allowed = f"{side} {setup.goal.value_key} = {goal.value:g}, because trials stop there"
            raise ConfigError("study.goals", value, allowed)
        try:
            goal.with_value(value)
        except ConfigError as error:
            raise ConfigError("study.goals", value, error.allowed or "") from None


def check_new_metrics(setup: StudySetup) -> None:
    """Raise ConfigError for a metric that has the name of a column of the tables.

    It is only for new studies: stored ones may have metrics of names that became columns later.
    """
    allowed = "a name that no column of the tables has"
    if setup.built_goal.metric in TABLE_COLUMNS:
        raise ConfigError("goal.metric", setup.built_goal.metric, allowed)
    for name in setup.study.metrics:
        if name in TABLE_COLUMNS:
            raise ConfigError("study.metrics", name, allowed)


def check_readings(setup: StudySetup) -> None:
    """Raise ConfigError for readings that do not exist, or that this study cannot take."""
    reserved = columns_of_tables(setup)
    for spec in setup.readings:
        reading = spec.build()
        if reading.name in reserved and spec.kind not in READINGS.values():
            raise ConfigError(READINGS_KEY, reading.name, "a name that no column of the tables has")
        if setup.ranks > 1 and not reading.over_ranks:
            allowed = (
                f"readings with over_ranks = True, because {setup.ranks} ranks train each trial"
            )
            raise ConfigError(READINGS_KEY, reading.name, allowed)


def columns_of_tables(setup: StudySetup) -> set[str]:
    """Return the columns that the tables of a study have without readings."""
    study = setup.study
    metrics = (setup.built_goal.metric, *study.metrics)
    return reserved_columns(study.space, study.axes, metrics)


def check_keys(setup: StudySetup) -> None:
    """Check the keys of the search space and of the grid, and that batches can be accumulated.

    Raises:
        ConfigError: for an unknown key, for a key that two parts of a study set, and for a batch
            size that gradient accumulation cannot divide.
    """
    study, workload = setup.study, setup.workload
    for key in study.space:
        _check_key(SPACE, key)
    for key in study.axes:
        _check_key(GRID, key)
        if key in study.space and key in LOCAL_KEYS:
            raise ConfigError(GRID, key, f"another key: {SPACE} sets this one already")
    _check_set_once(setup)
    _check_method_options(setup)
    _check_sparsities_of_methods(setup)
    for value in study.axes.get(ACCUMULATION_KEY, ()):
        check_accumulation(f"{GRID}.{ACCUMULATION_KEY}", value)
    for cell in study.cells:
        parts = workload.parts_of(cell)
        if cell.batch_size % parts:
            allowed = (
                f"multiples of {ACCUMULATION_KEY} = {parts}: the examples of an optimizer step"
            )
            raise ConfigError("study.batch_sizes", cell.batch_size, allowed)
    _check_batch_schedules(setup)


def _check_method_options(setup: StudySetup) -> None:
    """Raise ConfigError for an option that no method of an axis takes."""
    methods = setup.study.axes.get("pruning.method")
    if methods is None:
        return
    for name, value in (setup.pruning.options or {}).items():
        if not any(takes_option(str(method), name) for method in methods):
            allowed = f"an option of one of {', '.join(map(str, methods))}"
            raise ConfigError(f"{METHOD_OPTIONS}{name}", value, allowed)


def _check_sparsities_of_methods(setup: StudySetup) -> None:
    """Raise ConfigError for a sparsity that the method of its cell cannot make."""
    for cell in setup.study.cells:
        if cell.sparsity:
            config = setup.trial_settings().resolve(Trial(cell, 0)).pruning
            pruner_of(config.method, config.options).check_sparsity(cell.sparsity)


def _check_batch_schedules(setup: StudySetup) -> None:
    """Raise ConfigError for schedules of the batch size that no cell uses, or that do not fit."""
    is_used = False
    for cell in setup.study.cells:
        config = setup.batch.with_axes(cell.axes)
        if not config.build().is_constant:
            is_used = True
            _check_batch_schedule(setup, cell, config)
    options = [key for key in setup.study.axes if key.startswith(BATCH_OPTIONS)]
    if not is_used and (options or setup.batch.options):
        value = options or setup.batch.options
        raise ConfigError(OPTIONS_KEY, value, f"omitted, because {NAME_KEY} is {CONSTANT}")
    rate = setup.study.axes.get(RATE_KEY, setup.batch.rate)
    if not is_used and rate != NO_RATE_RULE:
        raise ConfigError(RATE_KEY, rate, f"omitted, because {NAME_KEY} is {CONSTANT}")


def _check_batch_schedule(setup: StudySetup, cell: Cell, config: BatchConfig) -> None:
    """Raise ConfigError if a schedule does not reach the batch size of a cell in its budget."""
    if setup.goal.unit != STEPS.name:
        allowed = (
            f"steps, because {NAME_KEY} changes the batch size and the law holds for "
            "constant batch sizes"
        )
        raise ConfigError("goal.unit", setup.goal.unit, allowed)
    if setup.smoothness.interval is not None:
        allowed = (
            f"{CONSTANT}, because smoothness.interval is set and the theory predicts K at "
            "one batch size"
        )
        raise ConfigError(NAME_KEY, config.schedule, allowed)
    parts = setup.workload.parts_of(cell)
    sizes = config.build().sizes_of_parts(cell.batch_size, parts)
    for size in islice(sizes, setup.goal.max_steps * parts):
        if size * parts == cell.batch_size:
            return
    allowed = f"a schedule that reaches B = {cell.batch_size} within goal.max_steps"
    raise ConfigError(NAME_KEY, config.schedule, allowed)


def _check_key(source: str, key: str) -> None:
    """Raise ConfigError for an unknown key of local SGD, pruning, stale gradients, trainer."""
    if key.startswith("local.") and key not in LOCAL_KEYS:
        raise ConfigError(source, key, f"one of {', '.join(LOCAL_KEYS)}")
    if (
        key.startswith("pruning.")
        and key not in PRUNING_KEYS
        and not key.startswith(METHOD_OPTIONS)
    ):
        allowed = (
            f"one of {', '.join(PRUNING_KEYS)}, {METHOD_OPTIONS}NAME of an argument of the method"
        )
        raise ConfigError(source, key, allowed)
    if key in (PATH_KEY, f"{METHOD_OPTIONS}options.path"):  # the second one is of shuffle
        raise ConfigError(source, key, "another key: run a study for each file of masks")
    if key.startswith("trainer.") and (source != GRID or key not in TRAINER_KEYS):
        raise ConfigError(source, key, f"in study.grid one of {', '.join(TRAINER_KEYS)}")
    if key.startswith("batch.") and (
        source != GRID or (key not in BATCH_KEYS and not key.startswith(BATCH_OPTIONS))
    ):
        allowed = f"in study.grid {', '.join(BATCH_KEYS)} or {BATCH_OPTIONS}NAME"
        raise ConfigError(source, key, allowed)
    if key.startswith("optim.") and key not in OPTIM_KEYS:
        raise ConfigError(source, key, f"one of {', '.join(OPTIM_KEYS)}")


def _check_set_once(setup: StudySetup) -> None:
    """Raise ConfigError if two parts of a study set one argument of the model or the data.

    Two keys may be two spellings of one argument, so places in the configuration are compared.
    """
    study, workload = setup.study, setup.workload
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    set_by: dict[tuple[int, str], str] = {}
    arguments_of_data = specs["data"].get("init_args", {})
    if "order_seed" in arguments_of_data:
        set_by[id(arguments_of_data), "order_seed"] = "study.seed"
    for source, key in keys_of_trials(study, workload):
        may_be_class = source == GRID or isinstance(study.space.get(key), Choices)
        node, name = locate(specs, key, source, may_be_class)
        place = (id(node), name)
        if place in set_by:
            raise ConfigError(source, key, f"another key: {set_by[place]} sets this one already")
        set_by[place] = source
        if source != BATCH_SIZE_KEY:
            set_by[place] = f"{source} {key}"


def check_workers(setup: StudySetup, cell: Cell, params: Mapping[str, Value]) -> None:
    """Raise ConfigError if local SGD is on and cannot be combined with the rest of a study."""
    config = setup.trial_settings().resolve(Trial(cell, 0, params))
    schedule = config.local
    if not schedule.on:
        return
    if not config.batch.build().is_constant:
        allowed = f"{CONSTANT}, because the workers of local SGD divide each batch"
        raise ConfigError(NAME_KEY, config.batch.schedule, allowed)
    pruning = config.pruning
    if cell.sparsity and pruner_of(pruning.method, pruning.options).every is not None:
        allowed = (
            f"a method whose mask does not change, with local.workers = {schedule.workers}: each "
            "worker has its own weights"
        )
        raise ConfigError("pruning.method", pruning.method, allowed)
    if setup.smoothness.interval is not None:
        allowed = "null, because the workers of local SGD train several networks"
        raise ConfigError("smoothness.interval", setup.smoothness.interval, allowed)
    for spec in setup.readings:
        reading = spec.build()
        if reading.follows_steps:
            allowed = (
                "readings at checks or at the end, because local SGD is on. This reading "
                "follows the steps, and each worker steps its own copy of the network"
            )
            raise ConfigError(READINGS_KEY, reading.name, allowed)
    for batch_size in setup.study.batch_sizes:
        if batch_size % schedule.workers:
            allowed = f"multiples of local.workers = {schedule.workers}"
            raise ConfigError("study.batch_sizes", batch_size, allowed)


def check_effects(setup: StudySetup) -> list[str]:
    """Return a note for each value that the study overrides, or that acts in no trial.

    Raises:
        ConfigError: for a pruning.sparsity that no cell has, and for arguments of a class that an
            axis or a choice replaces.
    """
    study, workload = setup.study, setup.workload
    specs = {"model": dict(workload.model), "data": dict(workload.data)}
    for source, key in keys_of_trials(study, workload):
        is_class = source == GRID or isinstance(study.space.get(key), Choices)
        if is_class and key.startswith(("model.", "data.")):
            node, name = locate(specs, key, source, classes=True)
            if isinstance(node.get(name), dict):
                _refuse_lost_arguments(source, key, node[name])
    sparsity = setup.pruning.sparsity
    if sparsity and sparsity not in study.sparsities:
        allowed = f"one of study.sparsities {study.sparsities}, or omitted"
        raise ConfigError("pruning.sparsity", sparsity, allowed)
    notes = [*_idle_arguments(setup), *_idle_values(setup)]
    if setup.goal.early_reject and not setup.built_goal.is_pointwise:
        notes.append(f"no check stops early, because goal.rule {setup.goal.rule} needs each value")
    if sparsity and study.sparsities != [sparsity]:
        notes.append(
            f"pruning.sparsity = {sparsity:g} has no effect in a study: it prunes to "
            f"study.sparsities {study.sparsities}"
        )
    return notes


def check_new_axes(setup: StudySetup) -> None:
    """Raise ConfigError for an axis or a searched key of a new study that acts in no trial.

    Its values would train the same. A stored study may have one, and its reports note it.
    """
    study = setup.study
    idle = idle_axes(setup.config(), study.axes, study.space)
    if idle:
        key, switches = next(iter(idle.items()))
        source = GRID if key in study.axes else SPACE
        allowed = f"another key, because {key} has no effect while {switches} is off"
        raise ConfigError(source, key, allowed)


def _idle_values(setup: StudySetup) -> Iterator[str]:
    """Yield a note for each fixed value that acts in no trial."""
    config = setup.config()
    for key, switches in keys_that_are_off(config, setup.study.axes, setup.study.space):
        value = fixed_value(config, key)
        if value not in (None, getattr(LocalSGDSchedule(), key.partition(".")[2], None)):
            yield f"{key} = {text_of(value)} has no effect while {switches} is off"


def _idle_arguments(setup: StudySetup) -> Iterator[str]:
    """Yield a note for each argument of our module that none of its rules and schedules reads."""
    model = setup.workload.model
    if not model["class_path"].startswith("lit_dps."):
        return
    rules = rules_of(setup)
    schedules = _choices_of(setup, "schedule", "constant")
    ignored_by: dict[str, str] = {}
    of_rules = set(chain.from_iterable(rule_named(rule).hyperparameters for rule in rules))
    for name in set(chain.from_iterable(rule.hyperparameters for rule in BUILT_IN)):
        if name not in of_rules:
            ignored_by[name] = f"optimizer {', '.join(rules)}"
    if "wsd" not in schedules:
        ignored_by["decay_share"] = f"schedule {', '.join(schedules)}"
    if set(schedules) == {"constant"}:
        for name in ("decay_steps", "end_factor"):
            ignored_by[name] = "schedule constant"
    # Defaults are skipped, because the command line adds them to every configuration.
    for name, value in _changed_arguments(model).items():
        key = f"model.{name}"
        # Trials that vary an argument replace its fixed value.
        is_fixed = key not in setup.study.axes and key not in setup.space
        if name in ignored_by and is_fixed:
            yield f"{key} = {text_of(value)} has no effect with {ignored_by[name]}"


def rules_of(setup: StudySetup) -> list[str]:
    """Return the values of `model.optimizer` of a study with a module of lit_dps."""
    return _choices_of(setup, "optimizer", "sgd")


def _choices_of(setup: StudySetup, name: str, default: str) -> list[str]:
    """Return the values of an argument of a module of lit_dps that is a name."""
    key = f"model.{name}"
    box = setup.space.get(key)
    if isinstance(box, Choices):
        return list(map(str, box.choices))
    fixed = setup.workload.model.get("init_args", {}).get(name, default)
    return list(map(str, setup.study.axes.get(key, [fixed])))


def _refuse_lost_arguments(source: str, key: str, spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if a class that others replace was configured with arguments."""
    for argument, value in _changed_arguments(spec).items():
        allowed = (
            f"a class without arguments. {key}.{argument} = {value!r} would be lost: "
            "remove it, or make it an axis too"
        )
        raise ConfigError(source, key, allowed)


def _changed_arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class that differ from their defaults; {} without a signature."""
    module, _, name = spec["class_path"].rpartition(".")
    try:
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    except (ImportError, AttributeError, ValueError):
        # A class within another class, or one of a library in C, has no readable signature.
        return {}
    changed = {}
    for argument, value in (spec.get("init_args") or {}).items():
        default = inspect.Parameter.empty
        if argument in parameters:
            default = parameters[argument].default
        if isinstance(default, tuple):
            default = list(default)
        if value != default:
            changed[argument] = value
    return changed
