"""What each pruning method of a study keeps of each layer, at initialization: nothing is trained or
stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.trial import Series, Trial
from lit_dps.pruning.pruner import Scores
from lit_dps.storage.sobol import sobol_point
from lit_dps.study.setup import StudySetup
from lit_dps.training.rng_state import preserve_rng_state


def masks(
    setup: StudySetup, sparsities: Sequence[float], points: int
) -> Iterator[tuple[Series, int, dict[str, tuple[int, int]]]]:
    """Series, point, and kept and all elements of each tensor, as a trial of the study would have
    them.

    Scores that serve every sparsity are taken once a point. At the smallest batch size: a mask does
    not depend on it.

    Args:
        setup: The study, checked.
        sparsities: In place of its own.
        points: How many of its points.

    Raises:
        UserError: for what cannot be pruned so.
    """
    study, training = setup.study, setup.training()
    least = dict.fromkeys(
        replace(c, batch_size=min(study.batch_sizes), sparsity=0.0) for c in study.cells
    )
    for cell in least:
        for point in range(points):
            params = sobol_point(study.space, study.seed, point, study.scramble)
            known: tuple[tuple[int, ...], Scores] | None = None
            for sparsity in (s for s in sparsities if s > 0):
                trial = Trial(replace(cell, sparsity=sparsity), point, params, study.seed)
                pruning = training.pruning_callback(trial)
                pruning.init = "original"  # the mask does not know of it
                if known is not None:
                    pruning.reuse(*known)
                built = training.workload.build(trial)
                with preserve_rng_state(seed=trial.seed_for("order")), suppress(_Pruned):
                    own = {"callbacks": [*built.trainer["callbacks"], pruning, _Stop()]}
                    Trainer(**{**built.trainer, **own}).fit(built.module, datamodule=built.data)
                if pruning.key is not None and pruning.scores is not None:
                    known = pruning.key, pruning.scores
                yield trial.cell.series, point, pruning.mask.kept()


class _Pruned(Exception):
    """The mask is made."""


class _Stop(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise _Pruned
