"""Parts of a configuration written so that those of earlier versions, and other ways to say the
same, are equal."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import VALIDATION_ERROR
from lit_dps.core.search_space import Choices
from lit_dps.data import ImageData
from lit_dps.models import MLP, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.training.trainer_rules import STUDY_TRAINER
from lit_dps.training.workload import Workload, class_paths, classes_in, place_of

# How trials of other people's modules are seeded, pruned and accumulated; 1 was never written down
PROTOCOL = 2
# Arguments that decide where and how fast things run, or what is shown, and not what comes out
FREE_DATA = ("root", "download", "eval_batch_size", "order_seed", "num_workers", "pin_memory")
UNREAD_DATA = (
    "root",
    "eval_batch_size",
)  # of them, those that decide what data without a digest are
_FREE_TRAINER = {
    *STUDY_TRAINER,
    *("accelerator", "devices", "num_nodes", "strategy", "use_distributed_sampler"),
    *("default_root_dir", "log_every_n_steps", "profiler"),
    *("val_check_interval", "check_val_every_n_epoch", "max_steps"),  # GoalErrorCallback sets them
}
# Arguments that studies of earlier versions were declared without, by the class that has them
_ADDED = {
    ImageClassifier: ("beta1", "beta2", "epsilon", "weight_decay", "label_smoothing"),
    ImageData: ("train_examples",),
    SimpleCNN: ("width", "depth"),
    MLP: ("width", "depth"),
}


def goal_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The goal, alike for all ways to write it; a validation error as before there were other
    metrics."""
    found = {
        key: value for key, value in given.items() if key != "early_reject" and value is not None
    }
    if "metric" in found:
        found["monitor"] = found.pop("metric")
    if 0 < found.get("at_most", 0) < 1 and found["monitor"] == VALIDATION_ERROR:
        found["error"] = found.pop("at_most")
    return found


def trainer_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of the trainer decides results, where it is not the trainer's default."""
    standard = {
        name: p.default for name, p in inspect.signature(Trainer.__init__).parameters.items()
    }
    return {
        key: value
        for key, value in given.items()
        if key not in _FREE_TRAINER and value != standard.get(key)
    }


def is_ours(study: StudyConfig, workload: Workload) -> bool:
    """Whether all classes of a study, those of its axes and choices too, are this package's or
    PyTorch's."""
    choices = (box.choices for box in study.space.values() if isinstance(box, Choices))
    axes = (
        value
        for values in (*study.axes.values(), *choices)
        for value in values
        if "." in str(value)
    )
    paths = [*class_paths(workload), *(value for value in axes if isinstance(value, str))]
    return all(path.startswith(("lit_dps.", "torch.")) for path in paths)


def is_unread(data: LightningDataModule | None) -> bool:
    """Whether data are somebody else's, whose content nothing is known of: our own have a
    digest."""
    ours = isinstance(data, ImageData) or type(data).__module__.startswith("lit_dps.")
    return data is not None and not ours and getattr(data, "digest", None) is None


def forget_added(nested: Mapping[str, Any]) -> None:
    """Takes arguments that classes have since a later version out of a configuration, where they
    are the defaults."""
    for spec in classes_in(nested):
        module, _, name = spec["class_path"].rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except (ImportError, ValueError):  # what only looks like a class
            continue
        arguments = spec.get("init_args") or {}
        for base, added in _ADDED.items() if isinstance(kind, type) else ():
            if not issubclass(kind, base):
                continue
            own = (
                {}
                if kind.__init__ is base.__init__
                else inspect.signature(kind.__init__).parameters
            )
            defaults = inspect.signature(base.__init__).parameters
            for key in added:
                if key not in own and key in arguments and arguments[key] == defaults[key].default:
                    arguments.pop(key)


def once_lost(study: StudyConfig, batch_size_key: str) -> bool:
    """Whether trials of earlier versions did not have a value that was set below a class of an axis
    or a choice.

    The class was set after it, so that the value had no effect. Such trials are of another study.
    """
    axes = sorted(key for key in study.axes if key.startswith(("model.", "data.")))
    order = [place_of(key) for key in (batch_size_key, *study.space, *axes)]
    return any(
        key[: len(later)] == later for i, key in enumerate(order) for later in order[i + 1 :]
    )
