"""The examples of a run of `fit`, for its document."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.cli.fit import _all_steps_are_full, _without_our_options
from lit_dps.training import BatchScheduleCallback

CONSTANT = BatchScheduleCallback()
GROWING = BatchScheduleCallback("0:B/2 50%:B", {"steps": 100})


@pytest.mark.parametrize(
    ("examples", "drop_last", "accumulate", "callbacks", "expected"),
    [
        (64, False, 1, [CONSTANT], True),
        (64, False, 1, [], True),
        (60, False, 1, [CONSTANT], False),  # the last of 8 batches has 4 examples
        (60, True, 1, [CONSTANT], True),
        (60, True, 2, [CONSTANT], False),  # 7 batches: the last step has one
        (64, False, 2, [CONSTANT], True),
        (64, False, 1, [GROWING], False),
    ],
)
def test_a_short_last_batch_makes_a_short_step(
    examples, drop_last, accumulate, callbacks, expected
):
    data = TensorDataset(torch.zeros(examples, 1))
    loader = DataLoader(data, batch_size=8, drop_last=drop_last)
    loop = SimpleNamespace(_combined_loader=CombinedLoader(loader), _data_fetcher=None)
    trainer = SimpleNamespace(
        callbacks=callbacks,
        num_training_batches=len(loader),
        accumulate_grad_batches=accumulate,
        fit_loop=loop,
    )
    assert _all_steps_are_full(trainer) is expected


def test_lightning_reads_no_option_that_only_this_package_has():
    words = ["--config", "a.yaml", "--checkpoint", "a.ckpt", "--json", "--goal.error", "0.1"]
    assert _without_our_options(words) == ["--config", "a.yaml", "--goal.error", "0.1"]
    assert _without_our_options(["--checkpoint=a.ckpt", "--seed_everything", "1"]) == [
        "--seed_everything",
        "1",
    ]
