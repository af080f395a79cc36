"""A user's module that raises in the middle of training, at high learning rates, until its file
`mended` is there."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.plain_user import Classifier


class Failing(Classifier):
    """Fails at its eighth step."""

    def __init__(self, width: int = 32, lr: float = 1e-2, above: float = 0.0):
        super().__init__(width, lr)
        self.save_hyperparameters()
        self.taken = 0

    def training_step(self, batch, batch_idx):
        if self.taken == 7 and self.hparams.lr > self.hparams.above and not Path("mended").exists():
            raise ValueError("a label of step 7 is out of range")
        self.taken += 1
        return super().training_step(batch, batch_idx)
