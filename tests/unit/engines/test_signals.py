"""While a trial is set up and trained a signal goes to whoever handled it before: no handler of
Lightning's."""

from __future__ import annotations

import signal

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_dps.engines.lightning_loop import StudySignals


class Watching(BoringModel):
    """Notes who handles SIGTERM where loaders are made and where it trains."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def train_dataloader(self):
        self.found["loader"] = signal.getsignal(signal.SIGTERM)
        return super().train_dataloader()

    def training_step(self, batch, batch_idx):
        self.found["step"] = signal.getsignal(signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def fitted(callbacks: list) -> dict:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", max_steps=1, callbacks=callbacks, enable_model_summary=False, **quiet
    )
    module = Watching()
    trainer.fit(module)
    return module.found


def test_signals_are_ours_from_the_first_loader_on():
    def ours(signum, frame) -> None: ...

    before = signal.signal(signal.SIGTERM, ours)
    try:
        assert fitted([StudySignals()]) == {"loader": ours, "step": ours}
        assert signal.getsignal(signal.SIGTERM) is ours
        assert fitted([])["loader"] is not ours, (
            "Lightning has none of its own any more: nothing is tested"
        )
    finally:
        signal.signal(signal.SIGTERM, before)
