"""Every pruning method prunes alike by Lightning's loop, by the interval loop, and among stacked
trials of others."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.network_run import NetworkRun
from lit_dps.pruning import PRUNERS, Snip, pruner_of
from lit_dps.training.workload import Workload
from tests.support import pruners
from tests.support.pruners import AT_START, GENERAL
from tests.support.runs import train, train_one

MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {
        "network": {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [24, 12]}},
        "optimizer": "momentum",
    },
}
WORKLOAD = Workload(
    MODEL, {"class_path": "lit_dps.data.Digits", "init_args": {}}, {"accelerator": "cpu"}
)
GOAL = {"error": 0.05, "check_interval": 4, "max_steps": 8}
PARAMS = {"model.learning_rate": 0.1, "model.momentum": 0.9}


@pytest.mark.parametrize("method", AT_START)
def test_a_method_prunes_and_trains_the_same_to_the_bit_in_both_engines(method):
    trial = Trial(Cell(16, 0.8), 1, PARAMS)
    ours, theirs = (
        train_one(trial, WORKLOAD, GOAL, lean=lean, pruning={"method": method})
        for lean in (True, False)
    )
    assert dataclasses.replace(ours, seconds=0.0) == dataclasses.replace(theirs, seconds=0.0)
    kept, total = (sum(counts) for counts in zip(*ours.kept.values(), strict=True))
    assert 0 < kept < total and (kept == round(0.2 * total)) is PRUNERS[method].hits_count


def test_stacked_trials_may_be_pruned_by_different_methods():
    methods = ["snip", "grasp", "snap", "synflow", "shuffle"]
    trials = [Trial(Cell(16, 0.8, (("pruning.method", method),)), 1, PARAMS) for method in methods]
    stacked = train(trials, WORKLOAD, GOAL, size=len(methods))
    alone = [train_one(trial, WORKLOAD, GOAL) for trial in trials]
    by_cell = {result.trial.cell: result for result in stacked}
    assert all("stacked" in result.flags for result in stacked)
    for result in alone:
        other = by_cell[result.trial.cell]
        assert other.kept == result.kept
        assert other.curve["train_loss"] == pytest.approx(result.curve["train_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "method", [m for m in GENERAL if getattr(pruner_of(m), "batch_invariant", False)]
)
def test_masks_that_sum_over_examples_do_not_depend_on_the_batches(method):
    one, other = (
        pruners.mask(method, pruners.network(pruners.small(), size=size), 0.7) for size in (4, 24)
    )
    assert pruners.equal(one, other)


def test_a_score_of_somebody_else_is_not_taken_for_a_sum():
    class Own(Snip):
        def scores(self, network, generator):
            return super().scores(network, generator)

    assert Snip().batch_invariant and not Own().batch_invariant


@pytest.mark.parametrize(
    ("options", "sizes"), [({}, {1000}), ({"batches": 2}, {100}), ({"abs_per_batch": True}, {100})]
)
def test_a_pass_on_a_gpu_takes_larger_batches_where_the_mask_is_a_sum(monkeypatch, options, sizes):
    asked, prune, copied = set(), NetworkRun._prune, NetworkRun.copy_to_prune
    monkeypatch.setattr(
        NetworkRun,
        "_prune",
        lambda self, training, at_least, scores: prune(self, training, 1000, scores),
    )
    # A patch of ImageData itself would send the trials to Lightning's loop.
    monkeypatch.setattr(
        NetworkRun,
        "copy_to_prune",
        lambda self, how, size: asked.add(size) or copied(self, how, size),
    )
    trials, pruning = (
        [Trial(Cell(16, 0.8), i, PARAMS) for i in range(2)],
        {"method": "snip", "options": options},
    )
    ours = train(trials, WORKLOAD, GOAL, size=2, pruning=pruning)
    assert asked == sizes
    monkeypatch.setattr(NetworkRun, "_prune", prune)
    theirs = train(trials, WORKLOAD, GOAL, size=2, pruning=pruning)
    assert [r.kept for r in ours] == [r.kept for r in theirs]
    assert [r.curve["train_loss"] for r in ours] == [
        pytest.approx(r.curve["train_loss"], rel=1e-4) for r in theirs
    ]


@pytest.mark.parametrize("option", [("batches", 1), ("abs_per_batch", 1)])
def test_an_axis_may_be_an_argument_of_the_method(option):
    name, value = option
    pruning = {"method": "snip", "options": {"batches": 2}, "batch_size": 40}
    axis = Trial(Cell(16, 0.8, ((f"pruning.options.{name}", value),)), 1, PARAMS)
    given = {**pruning, "options": {**pruning["options"], name: value}}
    usual, ours, asked = (
        train_one(trial, WORKLOAD, GOAL, pruning=how)
        for trial, how in (
            (dataclasses.replace(axis, cell=Cell(16, 0.8)), pruning),
            (axis, pruning),
            (axis, given),
        )
    )
    assert ours.curve == asked.curve and ours.kept == asked.kept and ours.curve != usual.curve
