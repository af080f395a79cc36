"""What is fresh in a repeat: its seeds, its initial weights, its mask and its order of examples, in
every engine."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.training.workload import Workload
from tests.support.runs import train
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401

A, B = Cell(4), Cell(8)


def test_a_repeat_has_seeds_of_its_own_and_the_search_keeps_its_seeds():
    trial = Trial(A, 3, seed=7)
    assert trial.seed_for("init") == int.from_bytes(
        hashlib.sha256(b"7/init/3").digest()[:4], "big"
    ), "as ever"
    again = [Trial(cell, 3, seed=7, repeat=number) for cell in (A, B) for number in (1, 2)]
    seeds = {t.seed_for(purpose) for t in (trial, *again) for purpose in ("init", "order", "prune")}
    assert len(seeds) == 15
    assert [str(t) for t in (trial, again[1])] == ["B=4 S=0 sample 3", "B=4 S=0 sample 3 repeat 2"]


@pytest.mark.parametrize("order", ["authors", "per_trial"])
def test_the_order_of_a_repeat_is_fresh_and_the_split_is_not(order):
    workload = Workload(MODEL, {**DATA, "init_args": {"order": order}}, {"accelerator": "cpu"})
    epochs = []
    for repeat in (0, 1, 2, 1):
        data = workload.build(Trial(Cell(16), 1, PARAMS, repeat=repeat)).data
        data.setup()
        epochs.append(next(data.epochs()))
        assert sorted(epochs[-1]) == list(range(len(epochs[-1])))
        assert torch.equal(data.images.y["val"], _split())
    assert np.array_equal(epochs[1], epochs[3])
    assert not any(np.array_equal(epochs[i], epochs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def _split() -> torch.Tensor:
    data = Digits()
    data.setup()
    return data.images.y["val"]


def test_both_engines_train_the_same_repeats():
    asked = [
        Trial(Cell(16, s), 1, PARAMS, repeat=repeat) for s in (0.0, 0.5) for repeat in (0, 1, 2)
    ]
    goal = {"error": 0.2, "check_interval": 4, "max_steps": 40}
    ours, theirs = (
        [dataclasses.replace(r, seconds=0.0) for r in train(asked, WORKLOAD, goal, lean=lean)]
        for lean in (True, False)
    )
    assert ours == theirs
    assert len({tuple(r.curve["train_loss"]) for r in ours}) == 6, "each begins elsewhere"
    stacked = train(asked[:3], WORKLOAD, goal, size=3)
    assert sorted(r.trial.repeat for r in stacked) == [0, 1, 2]
    for r in stacked:
        one = next(o for o in ours if o.trial == r.trial)
        assert r.curve["train_loss"][0] == pytest.approx(one.curve["train_loss"][0], rel=1e-4)
