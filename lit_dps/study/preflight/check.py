"""Checks a study before anything is created: its keys, then a dry run at both ends of its grid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from lightning.pytorch import LightningDataModule

from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import extremes
from lit_dps.core.trial import Trial
from lit_dps.parallel.ranks import started_by_torchrun
from lit_dps.storage.samplers import sampler_of
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.keys import check_goals, check_keys, check_workers
from lit_dps.study.setup import StudySetup
from lit_dps.training import DelayCallback, PruningCallback
from lit_dps.training.trainer_rules import check_trainer, overruled


def check(
    setup: StudySetup, settled: Callable[[LightningDataModule], bool] = lambda data: False
) -> LightningDataModule:
    """Check a study before its first trial. Creates nothing.

    Args:
        setup: The study.
        settled: Returns True if a study with this data has no remaining trials. Then the dry run is
            left out, because the trials have run under an equal configuration.

    Returns:
        The data module, set up for training.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
        DataError: if the data cannot be read.
    """
    study, trainer = setup.study, setup.workload.trainer
    study.check()
    PruningCallback(**setup.pruning)
    DelayCallback(**setup.optim)
    check_goals(setup)
    sampler_of(study, setup.goal_of_trials)
    check_trainer(trainer)
    check_keys(setup)
    if setup.ranks > 1 and study.engine == "fused":
        raise ConfigError(
            "study.engine",
            study.engine,
            f"lightning or auto where {setup.ranks} ranks train each trial",
        )
    if study.engine == "fused" and not study.lean:
        raise ConfigError("study.lean", False, "true where study.engine is fused")
    if started_by_torchrun() and setup.workers > 1:
        raise ConfigError(
            "study.workers", setup.workers, "1 under torchrun: start it once for each worker"
        )
    for cell in dict.fromkeys(
        replace(cell, batch_size=min(study.batch_sizes)) for cell in study.cells
    ):
        setup.training().pruning_of(Trial(cell, 0))
        setup.training().delay_of(Trial(cell, 0))
        for params in extremes(setup.space):  # classes refuse values that they do not allow
            data = setup.workload.build(Trial(cell, 0, params)).data
            check_workers(setup, cell, params)
    if settled(data):
        return data
    data, notes = dry_run(setup)
    for line in [*overruled(trainer), *notes]:
        print(f"note: {line}", file=sys.stderr)
    return data
