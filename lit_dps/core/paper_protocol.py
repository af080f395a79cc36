"""The protocol of Lee et al. 2021 (Section 2, Appendix B), and what a study trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.trial_config import BatchConfig, OptimConfig, PruningConfig

BATCH_SIZES = tuple(2**i for i in range(1, 15))
SPARSITIES = (0.0, 0.5, 0.7, 0.9)
TRIALS = 100


class Protocol(NamedTuple):
    """The goal of a workload of the paper."""

    error: float  # validation error
    check_interval: int  # steps between two validations
    max_steps: int


MNIST = Protocol(0.02, 16, 40_000)
# By the classes of data set and network.
_PROTOCOLS: dict[tuple[str, ...], Protocol] = {
    ("MNIST", "SimpleCNN"): MNIST,
    ("FashionMNIST", "SimpleCNN"): Protocol(0.12, 16, 40_000),
    ("CIFAR10", "ResNet8"): Protocol(0.4, 32, 100_000),
}


def training_sections() -> dict[str, dict[str, Any]]:
    """Return the sections that define how a trial trains, with the defaults of their keys."""
    sections = {
        "pruning": PruningConfig(),
        "optim": OptimConfig(),
        "local": LocalSGDSchedule(),
        "batch": BatchConfig(),
    }
    return {name: asdict(section) for name, section in sections.items()}


def protocol_of(config: Mapping) -> Protocol | None:
    """Return the paper's protocol of a study's workload; None if the paper has another one.

    Args:
        config: The configuration of the study.
    """
    return _PROTOCOLS.get(classes(config))


def classes(config: Mapping) -> tuple[str, ...]:
    """Return the class names of data set and network, those that a configuration names."""
    names = []
    for key in ("data.class_path", "model.init_args.network.class_path"):
        path = setting(config, key)
        if path is not None:
            names.append(str(path).rpartition(".")[2])
    return tuple(names)


def workload(record: StudyRecord) -> tuple[str, ...]:
    """Return what was trained on what: the class names (`classes`), else that of the workload."""
    return classes(record.config) or (record.workload,)
