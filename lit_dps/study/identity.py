"""The identity of a study: all of its configuration that decides results. Equal identities give equal tables."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lit_dps.config import StudyConfig
from lit_dps.goal import ERROR
from lit_dps.module import ImageClassifier
from lit_dps.training.protocol import STUDY_TRAINER
from lit_dps.training.workload import Workload, class_paths, locate

# How trials of other people's modules are seeded, pruned and accumulated; 1 was never written down
PROTOCOL = 2
# Arguments that decide where and how fast things run, or what is shown, and not what comes out
_FREE_DATA = ("root", "download", "eval_batch_size", "order_seed", "num_workers", "pin_memory")
_FREE_TRAINER = {
    *STUDY_TRAINER,
    *("accelerator", "devices", "num_nodes", "strategy", "use_distributed_sampler"),
    *("default_root_dir", "log_every_n_steps", "profiler"),
    *("val_check_interval", "check_val_every_n_epoch", "max_steps"),  # GoalErrorCallback sets them
}
# Arguments of ImageClassifier that studies of earlier versions were declared without
_ADDED = ("beta1", "beta2", "epsilon", "weight_decay")


def identity(
    study: StudyConfig,
    workload: Workload,
    goal: Mapping[str, Any],
    pruning: Mapping[str, Any],
    smoothness: Mapping[str, Any],
    data: LightningDataModule,
) -> dict[str, Any]:
    """What decides the results of a study, as plain JSON. Arguments as of `StudySetup`; `data` is set up."""
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    for name in _FREE_DATA:
        specs["data"].get("init_args", {}).pop(name, None)
    arguments = specs["model"].get("init_args", {})
    for name, default in _added_arguments(workload.model["class_path"]).items():
        if arguments.get(name) == default:
            arguments.pop(name)
    varied = [key for key in study.axes if not key.startswith("pruning.")]
    for key in (*study.space, *varied, workload.batch_size_key):  # each trial sets them
        node, name = locate(specs, key, "study.grid", classes=True)
        node.pop(name, None)
    pruned = {"sparsity", "seed", *(key.removeprefix("pruning.") for key in study.axes)}
    trainer = {key: value for key, value in workload.trainer.items() if key not in _FREE_TRAINER}
    standard = {name: p.default for name, p in inspect.signature(Trainer.__init__).parameters.items()}
    found = {
        **specs,
        "trainer": {key: value for key, value in trainer.items() if value != standard.get(key)},
        "goal": _goal(goal),
        "pruning": {key: value for key, value in pruning.items() if key not in pruned},
        "study": {
            "seed": study.seed,
            "scramble": study.scramble,
            "space": {key: dataclasses.asdict(range_) for key, range_ in study.space.items()},
        },
        "data_digest": getattr(data, "digest", None),
    }
    for key in ("exclude", "options"):  # where they are empty, as before there were such
        if not found["pruning"].get(key):
            found["pruning"].pop(key, None)
    axes = (value for values in study.axes.values() for value in values if "." in str(value))
    paths = [*class_paths(workload), *(value for value in axes if isinstance(value, str))]
    ours = all(path.startswith(("lit_dps.", "torch.")) for path in paths)
    if not ours or workload.accumulated > 1:
        found["protocol"] = PROTOCOL
    if smoothness["interval"] is not None:  # changes no result, but every trial of a study is measured alike
        found["smoothness"] = {key: value for key, value in smoothness.items() if key != "batch_size"}
    return found


def _goal(given: Mapping[str, Any]) -> dict[str, Any]:
    """The goal, alike for all ways to write it; a validation error as before there were other metrics."""
    found = {key: value for key, value in given.items() if key != "early_reject" and value is not None}
    if "metric" in found:
        found["monitor"] = found.pop("metric")
    if 0 < found.get("at_most", 0) < 1 and found["monitor"] == ERROR:
        found["error"] = found.pop("at_most")
    return found


def _added_arguments(class_path: str) -> dict[str, Any]:
    """The arguments that a module class has from ImageClassifier since a later version, with their defaults."""
    module, _, name = class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, ImageClassifier)):
        return {}
    own = {} if kind.__init__ is ImageClassifier.__init__ else inspect.signature(kind.__init__).parameters
    defaults = inspect.signature(ImageClassifier.__init__).parameters
    return {name: defaults[name].default for name in _ADDED if name not in own}
