"""A study's protocol beside that of the paper's workload (Lee et al. 2021, Section 2 and Appendix B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_dps.analysis import setting
from lit_dps.record import StudyRecord
from lit_dps.space import short_names

BATCH_SIZES = tuple(2**i for i in range(1, 15))
SPARSITIES = (0.0, 0.5, 0.7, 0.9)
TRIALS = 100


@dataclass(frozen=True)
class Protocol:
    """The goal of a workload of the paper.

    Attributes:
        error: Goal validation error.
        check_interval: Steps between checks.
        max_steps: Step budget.
    """

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
    """The names of data set and network, without their modules, in a study's configuration; those that it tells."""
    paths = (setting(config, key) for key in ("data.class_path", "model.init_args.network.class_path"))
    return tuple(str(path).rsplit(".", 1)[-1] for path in paths if path is not None)


def workload(record: StudyRecord) -> tuple[str, ...]:
    """What was trained on what: the names of data set and network, else of the workload."""
    return classes(record.config) or (record.workload,)


def protocol_rows(record: StudyRecord) -> list[dict[str, str]]:
    """The protocol of a study beside the paper's of that workload, as text. Columns: "", this study, the paper."""
    goal, paper = record.goal, WORKLOADS.get(classes(record.config))
    theirs = ("-",) * 3 if paper is None else (f"{paper.error:g}", str(paper.check_interval), f"{paper.max_steps:,}")
    rows = [
        ("batch sizes", _listed(record.batch_sizes), _listed(BATCH_SIZES)),
        ("sparsities", _listed(record.sparsities), _listed(SPARSITIES)),
        *((key, ", ".join(map(str, values)), "-") for key, values in record.axes.items()),
        ("trials a cell", str(record.trials), str(TRIALS)),
        ("goal validation error", _listed([goal.value, *record.goals]), theirs[0]),
        ("steps between checks", str(goal.check_interval), theirs[1]),
        ("step budget", f"{goal.max_steps:,}", theirs[2]),
        (
            "trials stop at",
            "the budget" if record.slack is None else f"{record.slack:g} K* of their cell",
            "the budget",
        ),
    ]
    return [dict(zip(("", "this study", "the paper"), row, strict=True)) for row in rows]


def search_text(record: StudyRecord) -> str:
    """The search space of a study in a line."""
    names = short_names(list(record.space))
    return "; ".join(f"{names[key]} [{box.low:g}, {box.high:g}] {box.scale}" for key, box in record.space.items())


def _listed(values) -> str:
    """Numbers in a row; 2, 4, ..., 16384 where they are more than six and double."""
    values = list(values)
    if len(values) > 6 and all(b == 2 * a for a, b in zip(values, values[1:], strict=False)):
        return f"{values[0]:g}, {values[1]:g}, ..., {values[-1]}"
    return ", ".join(f"{value}" if isinstance(value, int) else f"{value:g}" for value in values)
