"""The identity of a study: the part of its configuration that decides results, as plain JSON.

Two spellings of the same configuration have equal identities, also across versions of the package.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.identity import one_spelling
from lit_dps.core.registry import class_at, named_class
from lit_dps.core.search_space import Choices, space_to_dict
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial_config import GoalConfig, PruningConfig, identity_of
from lit_dps.data import ImageData
from lit_dps.models import MLP, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.pruning import PRUNERS, FromFile, Pruner, Shuffle
from lit_dps.pruning.from_file import content_hash
from lit_dps.readings.registry import resolve_readings
from lit_dps.storage.schema import UNREAD
from lit_dps.training.trainer_rules import ACCUMULATION_KEY, STUDY_TRAINER
from lit_dps.training.workload import Workload, class_paths, classes_in, locate, place_of

# Settings of a study that name keys of the model or the data.
SPACE = "study.space"
GRID = "study.grid"
BATCH_SIZE_KEY = "study.batch_size_key"

# Version of how trials of users' modules are seeded, pruned and accumulated. Protocol 1 was
# never released.
PROTOCOL = 2
# Arguments that change speed, folders or output, but no results.
FREE_DATA = ("root", "download", "eval_batch_size", "order_seed", "num_workers", "pin_memory")
# The free arguments that may change the content of data if it is unknown.
_CONTENT_ARGUMENTS = ("root", "eval_batch_size")
_FREE_TRAINER = {
    *STUDY_TRAINER,
    *("accelerator", "devices", "num_nodes", "strategy", "use_distributed_sampler"),
    *("default_root_dir", "log_every_n_steps", "profiler"),
    *("val_check_interval", "check_val_every_n_epoch", "max_steps"),  # GoalErrorCallback sets them
}
# Arguments that a later version of the package has added, by class.
_ADDED = {
    ImageClassifier: (
        *("beta1", "beta2", "epsilon", "weight_decay", "label_smoothing"),
        *("adamw_ratio", "warmup_steps", "decay_share", "refresh_steps"),
    ),
    ImageData: ("train_examples",),
    SimpleCNN: ("width", "depth"),
    MLP: ("width", "depth"),
}


def identity_of_study(
    study: StudyConfig,
    workload: Workload,
    sections: Mapping[str, Any],
    data: LightningDataModule | None,
) -> dict[str, Any]:
    """Return the configuration that decides results, as plain JSON.

    Equal identities give equal tables. Keys that were added to the package later are recorded only
    where they differ from their defaults, so that stored studies keep their identity.

    Args:
        study: Grid and search.
        workload: What a trial trains.
        sections: The sections of `TRIAL_SECTIONS`, by name.
        data: The data module, set up.
    """
    specs, free = _specs(study, workload)
    identity = {
        **specs,
        "trainer": trainer_of(workload.trainer, _names_below("trainer.", study.axes)),
        "goal": goal_of(sections["goal"]),
        "pruning": _pruning_of(sections["pruning"], study),
        "study": study_of(study, workload.batch_size_key),
        "data_digest": getattr(data, "digest", None),
    }
    accumulates = workload.accumulated > 1 or ACCUMULATION_KEY in study.axes
    unread = {name: free[name] for name in _CONTENT_ARGUMENTS if name in free}
    if unread and has_unknown_content(data):
        identity[UNREAD] = unread
    if not is_ours(study, workload) or accumulates:
        identity["protocol"] = PROTOCOL
    for name in ("optim", "batch"):
        section = identity_of(sections[name], _names_below(f"{name}.", study.axes))
        if section:
            identity[name] = section
    set_by_trials = _names_below("local.", [*study.space, *study.axes])
    if set_by_trials or sections["local"].on:
        identity["local"] = identity_of(sections["local"], set_by_trials)
    # Smoothness changes no result, but all trials of a study are measured in the same way.
    if sections["smoothness"].interval is not None:
        identity["smoothness"] = identity_of(sections["smoothness"])
    return one_spelling(identity, study.axes)


def _pruning_of(pruning: PruningConfig, study: StudyConfig) -> dict[str, Any]:
    """Return the identity of the section `pruning`, with the content of a file of masks."""
    identity = identity_of(pruning, _names_below("pruning.", study.axes))
    methods = study.axes.get("pruning.method", [pruning.method])
    if pruning.options:
        identity["options"] = _options_of(list(map(str, methods)), pruning.options)
    return identity


def _options_of(methods: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of pruning methods, with the content of a file of masks."""
    kinds = [named_class("pruning.method", name, PRUNERS, Pruner) for name in methods]
    changed = dict(options)
    if "path" in options and any(issubclass(kind, FromFile) for kind in kinds):
        changed["path"] = f"sha256:{content_hash(str(options['path']))}"
    of_other = options.get("options")
    if any(issubclass(kind, Shuffle) for kind in kinds) and isinstance(of_other, Mapping):
        changed["options"] = _options_of([str(options.get("of", "snip"))], of_other)
    return changed


def _specs(study: StudyConfig, workload: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return model and data without the keys that trials set, and the data's `FREE_DATA`."""
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    arguments = specs["data"].get("init_args", {})
    free = {name: arguments.pop(name) for name in FREE_DATA if name in arguments}
    forget_added(specs)
    keys = [key for _, key in keys_of_trials(study, workload)]
    # Keys below a class come before the class.
    for key in sorted(keys, key=place_of, reverse=True):
        node, name = locate(specs, key, "study.grid", classes=True)
        node.pop(name, None)
    return specs, free


def keys_of_trials(study: StudyConfig, workload: Workload) -> list[tuple[str, str]]:
    """Return the keys of model and data that trials set, each after the setting that names it."""
    keys = [(BATCH_SIZE_KEY, workload.batch_size_key)]
    for key in study.space:
        if not key.startswith("local."):
            keys.append((SPACE, key))
    for key in study.axes:
        if key.startswith(("model.", "data.")):
            keys.append((GRID, key))
    return keys


def _names_below(prefix: str, keys: Iterable[str]) -> set[str]:
    """Return the rest of each key that has a prefix."""
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def study_of(study: StudyConfig, batch_size_key: str) -> dict[str, Any]:
    """Return the part of a study's grid and search that decides results."""
    identity: dict[str, Any] = {
        "seed": study.seed,
        "scramble": study.scramble,
        "space": space_to_dict(study.space),
    }
    if study.sampler != "sobol":
        identity["sampler"] = study.sampler
    if sets_value_below_class(study, batch_size_key):
        identity["below_classes"] = True
    if study.best_of is not None:
        identity["best_of"] = study.best_of
    if study.train_past_goal:
        identity["train_past_goal"] = True
    if study.statistic != MINIMUM.name:
        identity["statistic"] = study.statistic
    # Metrics change no result, but all trials of a study keep the same metrics.
    if study.metrics:
        identity["metrics"] = sorted(study.metrics)
    # Readings change no result either, but all trials have the same columns.
    if study.readings:
        identity["readings"] = [spec.identity for spec in resolve_readings(study.readings)]
    return identity


def goal_of(goal: GoalConfig) -> dict[str, Any]:
    """Return the identity of a goal, the same for all ways to write it."""
    identity = identity_of(goal)
    if goal.metric is not None:
        identity["monitor"] = identity.pop("metric")
    if 0 < identity.get("at_most", 0) < 1 and identity["monitor"] == VALIDATION_ERROR:
        identity["error"] = identity.pop("at_most")
    return identity


def trainer_of(arguments: Mapping[str, Any], set_by_cells: Container[str] = ()) -> dict[str, Any]:
    """Return the trainer's arguments that decide results and differ from Lightning's defaults.

    Args:
        arguments: The arguments of the study.
        set_by_cells: Names of arguments that the cells set, so that they decide no result.
    """
    parameters = inspect.signature(Trainer.__init__).parameters
    identity = {}
    for name, value in arguments.items():
        default = parameters[name].default if name in parameters else None
        is_free = name in _FREE_TRAINER or name in set_by_cells
        if not is_free and value != default:
            identity[name] = value
    return identity


def is_ours(study: StudyConfig, workload: Workload) -> bool:
    """Return True if all classes of a study are of this package or of PyTorch.

    The classes of axes and choices count too.
    """
    values: list[Any] = []
    for axis in study.axes.values():
        values += axis
    for box in study.space.values():
        if isinstance(box, Choices):
            values += box.choices
    paths = list(class_paths(workload))
    for value in values:
        if isinstance(value, str) and "." in value:
            paths.append(value)
    return all(path.startswith(("lit_dps.", "torch.")) for path in paths)


def has_unknown_content(data: LightningDataModule | None) -> bool:
    """Return True for a user's data module without a digest."""
    if data is None or getattr(data, "digest", None) is not None:
        return False
    return not isinstance(data, ImageData) and not type(data).__module__.startswith("lit_dps.")


def forget_added(nested: Mapping[str, Any]) -> None:
    """Remove the arguments of `_ADDED` from a configuration where they are the defaults."""
    for spec in classes_in(nested):
        kind = class_at(spec["class_path"])
        if kind is None:  # this text only looks like a class path
            continue
        arguments = spec.get("init_args") or {}
        for base, added in _ADDED.items():
            if issubclass(kind, base):
                _forget_defaults(arguments, kind, base, added)


def _forget_defaults(
    arguments: dict[str, Any], kind: type, base: type, added: Iterable[str]
) -> None:
    """Remove arguments that a class inherits from `base` and that are the defaults."""
    redefined = {}
    if kind.__init__ is not base.__init__:
        redefined = inspect.signature(kind.__init__).parameters
    defaults = inspect.signature(base.__init__).parameters
    for key in added:
        if key in redefined or key not in arguments:
            continue
        if arguments[key] == defaults[key].default:
            del arguments[key]


def sets_value_below_class(study: StudyConfig, batch_size_key: str) -> bool:
    """Return True if a key is set before an axis or choice of a class that holds the key.

    For example, the axis model.network replaces the value of model.network.init_args.width in the
    search space. In earlier versions this value had no effect, so their trials belong to another
    study.
    """
    axes = sorted(key for key in study.axes if key.startswith(("model.", "data.")))
    places = [place_of(key) for key in (batch_size_key, *study.space, *axes)]
    for i, place in enumerate(places):
        for later in places[i + 1 :]:
            if place[: len(later)] == later:
                return True
    return False
