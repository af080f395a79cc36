"""What is checked of a whole study before anything is created: its keys, and a rehearsal of both ends of its grid."""

from __future__ import annotations

import copy

from lightning.pytorch import LightningDataModule

from lit_dps.config import StudyConfig
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.errors import ConfigError
from lit_dps.store import sobol_point
from lit_dps.study.rehearsal import rehearse
from lit_dps.training.workload import Workload, locate
from lit_dps.trial import Cell, Trial


def check_keys(study: StudyConfig, workload: Workload) -> None:
    """Raises ConfigError for a key that two parts of a study set, and for batch sizes that cannot be accumulated."""
    specs = copy.deepcopy({"model": dict(workload.model), "data": dict(workload.data)})
    set_by: dict[tuple[int, str], str] = {}
    if "order_seed" in (arguments := specs["data"].get("init_args", {})):
        set_by[id(arguments), "order_seed"] = "study.seed"
    keys = [("study.batch_size_key", workload.batch_size_key), *(("study.space", key) for key in study.space)]
    for source, key in [*keys, *(("study.grid", key) for key in study.axes if not key.startswith("pruning."))]:
        node, name = locate(specs, key, source, classes=source == "study.grid")
        if (place := (id(node), name)) in set_by:
            raise ConfigError(source, key, f"a key of its own: {set_by[place]} sets this one already")
        set_by[place] = source if source == "study.batch_size_key" else f"{source} {key}"
    for batch_size in study.batch_sizes:
        if batch_size % workload.accumulated:
            multiples = f"multiples of trainer.accumulate_grad_batches = {workload.accumulated}"
            raise ConfigError(
                "study.batch_sizes", batch_size, f"{multiples}: they are the examples of an optimizer step"
            )


def rehearse_ends(training: Training, study: StudyConfig) -> LightningDataModule:
    """Rehearses the smallest batch size of a study, and the largest of other people's data, at its largest sparsity.

    Returns:
        The data module of the smallest, set up for training.

    Raises:
        UserError: for what does not serve.
    """
    smallest, largest, sparsity = min(study.batch_sizes), max(study.batch_sizes), max(study.sparsities)
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    others = dict.fromkeys(cell.others for cell in study.cells)
    *_, first = (rehearse(training, Trial(Cell(smallest, sparsity, o), 0, point, study.seed)) for o in others)
    if hasattr(first.data, "check_batch_size"):
        for batch_size in study.batch_sizes:
            first.data.check_batch_size(batch_size // training.workload.accumulated)
    if largest > smallest and not standard_data(first.data):  # whose batches and checks are as they have to be
        cell = Cell(largest, sparsity, list(others)[-1])
        last = rehearse(training, Trial(cell, 0, point, study.seed), look_first=False, steps=1)
        if last.validated != first.validated:
            counts = [" + ".join(map(str, found.validated.values())) for found in (first, last)]
            shown = f"{counts[0]} at B = {smallest} and {counts[1]} at B = {largest}"
            name = type(first.data).__name__
            raise ConfigError("data", name, f"the same validation examples at every batch size, not {shown}")
    return first.data
