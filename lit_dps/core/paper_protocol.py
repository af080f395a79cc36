"""The paper's protocol, of all workloads and of each (Lee et al. 2021, Section 2, Appendix B); what
a study trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lit_dps.core.record import StudyRecord, setting

BATCH_SIZES = tuple(2**i for i in range(1, 15))
SPARSITIES = (0.0, 0.5, 0.7, 0.9)
TRIALS = 100


class Protocol(NamedTuple):
    """The goal of a workload of the paper: validation error, steps between checks, step budget."""

    error: float
    check_interval: int
    max_steps: int


MNIST = Protocol(0.02, 16, 40_000)
WORKLOADS = {  # by the classes of data set and network
    ("MNIST", "SimpleCNN"): MNIST,
    ("FashionMNIST", "SimpleCNN"): Protocol(0.12, 16, 40_000),
    ("CIFAR10", "ResNet8"): Protocol(0.4, 32, 100_000),
}


def classes(config: Mapping) -> tuple[str, ...]:
    """The names of data set and network, without their modules, in a study's configuration; those
    that it tells."""
    paths = (
        setting(config, key) for key in ("data.class_path", "model.init_args.network.class_path")
    )
    return tuple(str(path).rsplit(".", 1)[-1] for path in paths if path is not None)


def workload(record: StudyRecord) -> tuple[str, ...]:
    """What was trained on what: the names of data set and network, else of the workload."""
    return classes(record.config) or (record.workload,)
