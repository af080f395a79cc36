"""How long the gradients of single examples take, which the noise of the gradient is measured by.

On a CPU core that is 2.6 times a pass in batches for Simple-CNN, and 110 times for a perceptron,
whose batch is one product of matrices: no factor serves, so it is timed.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from lightning.pytorch import LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.readings import SmoothnessCallback
from lit_dps.readings.lipschitz import flatten
from lit_dps.study.pruning_probe import Looked
from lit_dps.study.setup import StudySetup
from lit_dps.training.stopwatch import now

EXAMPLES = 64


class NoiseStopwatch(SmoothnessCallback):
    """Times single gradients of some examples, then ends the run.

    Attributes:
        seconds: Of an example.
    """

    seconds = 0.0

    def __init__(self):
        super().__init__(interval=1, examples=EXAMPLES, noise=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(
            trainer, pl_module
        )  # which takes them once: the first time is the longest
        begin, weights = now(pl_module.device), flatten(self._parameters.values())
        self._moments(pl_module, weights)
        self.seconds = (now(pl_module.device) - begin) / EXAMPLES
        raise Looked


def single_gradient(setup: StudySetup) -> float:
    """Seconds of the gradient of one example, in the study's first cell; 0 where its noise is not
    measured."""
    if setup.smoothness.interval is None or not setup.smoothness.noise:
        return 0.0
    trial = Trial(
        dataclasses.replace(setup.study.cells[0], sparsity=0.0), 0, setup.middle, setup.study.seed
    )
    watch = NoiseStopwatch()
    with suppress(Looked), setup.workload.without_side_effects() as workload:
        training = dataclasses.replace(
            setup.training(), workload=workload, smoothness=SmoothnessConfig()
        )
        TrainerEngine(training, (watch,)).train_one(Attempt(trial, setup.unreached(0)))
    return watch.seconds
