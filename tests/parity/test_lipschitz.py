"""Local Lipschitz constants along training against those of the authors' own code."""

from __future__ import annotations

import json

import numpy as np
import pytest
from lightning.pytorch import Trainer

from lit_dps.callbacks import PruningCallback, SmoothnessCallback
from lit_dps.data import MNIST
from lit_dps.data.images import Images
from lit_dps.data.order import AuthorsOrder
from lit_dps.models import SimpleCNN
from lit_dps.module import ImageClassifier
from tests.parity.authors import DATA, REFERENCE, load, needs_reference, with_weights
from tests.parity.test_authors import Losses, one_thread  # noqa: F401

pytestmark = [needs_reference, pytest.mark.slow]

EXAMPLES = 10_000


class CutOrder(AuthorsOrder):
    """The authors' order where the training split is cut to its first examples before anything is shuffled."""

    def __init__(self, n: int):
        super().__init__(n)
        state = np.random.RandomState(0)
        state.shuffle(np.arange(n))
        self.train_ids = self.train_ids[:EXAMPLES]
        self.pruning_epoch = np.arange(EXAMPLES)
        state.shuffle(self.pruning_epoch)
        self._state = state.get_state()


class CutMNIST(MNIST):
    """MNIST with a training split of 10,000 examples."""

    def load(self) -> Images:
        whole = super().load()
        x = {**whole.x, "train": whole.x["train"][:EXAMPLES]}
        y = {**whole.y, "train": whole.y["train"][:EXAMPLES]}
        return Images(x, y, CutOrder(60_000), whole.digest)


def recorded_run(sparsity: float) -> dict:
    rows = [json.loads(line) for line in (REFERENCE / "lipschitz.jsonl").read_text().splitlines()]
    return next(row for row in rows if row["sparsity"] == sparsity)


# Training amplifies rounding, so the constants at steps 100 to 300 are no better known than this. Dense: from step 11
# on losses are others in the third digit, and by step 300 our own constants in float32 and in float64 are 2.7, 8.7 and
# 7.4 % apart, the authors' between them or 2 % beside them. At 0.9 two machines of ours are up to 1.2 % apart, and one
# of them 2.7 % from the authors'. That the function itself is exact is tested on known constants (tests/unit).
@pytest.mark.parametrize(("sparsity", "tolerance"), [(0.0, 0.1), (0.9, 0.05)])
def test_lipschitz_constants_along_training(sparsity, tolerance):
    recorded, run = load(f"lipschitz-mnist-s{sparsity}"), recorded_run(sparsity)
    network = with_weights(SimpleCNN(), load("mnist-simple-cnn-seed0-sub10000"))
    module = ImageClassifier(network, optimizer="momentum", learning_rate=run["lr"], momentum=run["momentum"])
    losses, measured = Losses(), SmoothnessCallback(run["lipschitz_interval"], last=0.9)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        max_epochs=-1,
        max_steps=run["cap"],
        accelerator="cpu",
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[losses, PruningCallback(sparsity), measured],
        **quiet,
    )
    trainer.fit(module, datamodule=CutMNIST(root=str(DATA), batch_size=run["batch_size"]))

    np.testing.assert_allclose(losses.values[:10], recorded["losses"][:10], rtol=1e-3)
    steps, theirs = zip(*run["lipschitz"], strict=True)
    assert measured.curve["step"] == list(steps)
    np.testing.assert_allclose(measured.curve["lipschitz"], theirs, rtol=tolerance)
