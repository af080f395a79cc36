"""A plain module and plain data: what all others are compared with."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.zoo.run import spec
from tests.zoo.verify import assert_works


def curves(outcome) -> list[dict]:
    return [dict(result.curve) for result in outcome.results]


def test_k_and_weights_are_as_audited(zoo):
    outcome = zoo(trials=2, noise_scale=True)
    assert_works(outcome)
    ended = [result.status for result in outcome.results]
    assert "complete" in ended and "incomplete" in ended, "a plainer case than it should be"
    assert len({result.steps for result in outcome.results}) > 2
    assert len(outcome.audits) >= 8


def test_batches_may_be_dictionaries(zoo):
    assert_works(zoo("steps.OnDicts", "data.DictBatches", batch_sizes=[16]))


def test_the_last_batch_of_an_epoch_may_be_left_out(zoo):
    assert_works(zoo(data=spec("data.Clouds", n=170, drop_last=True)))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_two_runs_draw_the_same_from_numpy_and_random(tmp_path, workers):
    from tests.zoo.run import study

    found = []
    for seed in (1, 2):
        np.random.seed(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        goal = {"error": 0.001, "monitor": "val_loss", "max_steps": 20}
        outcome = study(
            folder, data=spec("data.Noisy", workers=workers), goal=goal, batch_sizes=[32], trials=2
        )
        assert_works(outcome)
        found.append(curves(outcome))
    assert found[0] == found[1]
