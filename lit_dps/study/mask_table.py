"""Counts the weights of each layer that the pruning methods of a study keep at initialization.

Nothing is trained or stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.trial import Series, Trial
from lit_dps.pruning.pruner import Scores
from lit_dps.storage.samplers import sobol_point
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.rng_state import preserve_rng_state


def masks(
    setup: StudySetup, sparsities: Sequence[float], points: int
) -> Iterator[tuple[Series, int, dict[str, tuple[int, int]]]]:
    """Yield series, point, and the kept and all elements of each tensor.

    The study's trials have the same masks at its smallest batch size; a mask does not depend on the
    batch size. Scores that are valid for every sparsity are computed once a point.

    Args:
        setup: The study, checked.
        sparsities: Sparsities in place of the study's.
        points: The number of points.

    Raises:
        UserError: if a network cannot be pruned.
    """
    study, training = setup.study, setup.training()
    smallest = min(study.batch_sizes)
    cells = {replace(cell, batch_size=smallest, sparsity=0.0): None for cell in study.cells}
    for cell in cells:
        for point in range(points):
            params = sobol_point(study.space, study.seed, point, study.scramble)
            scores: tuple[tuple[int, ...], Scores] | None = None
            for sparsity in sparsities:
                if sparsity <= 0:
                    continue
                trial = Trial(replace(cell, sparsity=sparsity), point, params, study.seed)
                pruning = training.pruning_callback(trial)
                pruning.init = "original"  # the mask does not depend on the initialization after it
                if scores is not None:
                    pruning.reuse(*scores)
                _prune(setup, trial, pruning)
                if pruning.key is not None and pruning.scores is not None:
                    scores = (pruning.key, pruning.scores)
                assert pruning.mask is not None
                yield trial.cell.series, point, pruning.mask.kept()


def _prune(setup: StudySetup, trial: Trial, pruning: PruningCallback) -> None:
    """Begin a fit of a trial, and end it when the callback has made its mask."""
    built = setup.workload.build(trial)
    callbacks = [*built.trainer["callbacks"], pruning, _EndAfterPruning()]
    with preserve_rng_state(seed=trial.seed_for("order")), suppress(_Pruned):
        trainer = Trainer(**{**built.trainer, "callbacks": callbacks})
        trainer.fit(built.module, datamodule=built.data)


class _Pruned(Exception):
    """The mask is made."""


class _EndAfterPruning(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise _Pruned
