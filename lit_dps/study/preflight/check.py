"""Checks a study before anything is created: its keys, then a dry run at both ends of its grid."""

from __future__ import annotations

import sys
from dataclasses import replace

from lightning.pytorch import LightningDataModule

from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import extreme_points
from lit_dps.core.trial import STACKED, Trial
from lit_dps.engines.eligible import standard_data
from lit_dps.parallel import ranks, settings
from lit_dps.storage.samplers import make_sampler
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.keys import check_goals, check_keys, check_workers
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.trainer_rules import check_trainer, overridden_arguments


def check(setup: StudySetup) -> LightningDataModule:
    """Check the configuration of a study, then run it dry. Creates nothing.

    Returns:
        The data module, set up for training.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
        DataError: if the data cannot be read.
    """
    check_configuration(setup)
    return check_with_dry_run(setup)


def check_configuration(setup: StudySetup) -> LightningDataModule:
    """Check keys and values of a study, and build modules at the ends of the search space.

    Returns:
        A data module of the study, not set up.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    setup.study.check()
    PruningCallback.of(setup.pruning)
    check_goals(setup)
    make_sampler(setup.study, setup.goal_of_trials)
    check_trainer(setup.workload.trainer)
    settings.ranks_asked(setup.workload.trainer)  # refuses devices and strategies
    check_keys(setup)
    _check_engine(setup)
    if ranks.started_by_torchrun() and setup.workers > 1:
        allowed = "1 under torchrun: start it once for each worker"
        raise ConfigError("study.workers", setup.workers, allowed)
    return _build_at_ends(setup)


def check_with_dry_run(setup: StudySetup) -> LightningDataModule:
    """Run a study dry and print the notes. Return the data module, set up for training."""
    data, notes = dry_run(setup)
    for line in [*overridden_arguments(setup.workload.trainer), *notes]:
        print(f"note: {line}", file=sys.stderr)
    return data


def set_up_data(data: LightningDataModule) -> None:
    """Set a data module up for the identity of a study, without a dry run.

    Other data than `ImageData` may need a trainer for `setup`, and have no digest.
    """
    if standard_data(data):
        ranks.on_rank_zero(data.prepare_data)
        data.setup("fit")


def _check_engine(setup: StudySetup) -> None:
    engine = setup.study.engine
    if engine == STACKED and setup.ranks > 1:
        allowed = f"auto, single or lightning where {setup.ranks} ranks train each trial"
        raise ConfigError("study.engine", engine, allowed)


def _build_at_ends(setup: StudySetup) -> LightningDataModule:
    """Build module and data of each series at the ends of the search space.

    Classes refuse values that they do not allow.
    """
    smallest = min(setup.study.batch_sizes)
    cells = {replace(cell, batch_size=smallest): None for cell in setup.study.cells}
    data = None
    for cell in cells:
        setup.training().pruning_callback(Trial(cell, 0))
        setup.training().delay_callback(Trial(cell, 0))
        for params in extreme_points(setup.space):
            data = setup.workload.build(Trial(cell, 0, params)).data
            check_workers(setup, cell, params)
    assert data is not None  # a grid has a cell, a search space an end
    return data
