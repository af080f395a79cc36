"""Animals that look plain and are not."""

from __future__ import annotations

import shutil

import pytest

from lit_dps.core.exit_codes import ExitCode
from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

NEVER = {"goal": {"monitor": "val_loss", "error": 1e-6, "max_steps": 20}}
ONE = {"batch_sizes": [16], "sparsities": [0.8]}


def test_a_weight_that_is_the_same_for_batches_of_different_size(zoo):
    assert_refused(zoo("edges.ConstantWeight"), r"goal\.monitor", "batch_size=20", "different size")


def test_a_weight_that_is_proportional_to_the_examples(zoo):
    assert_works(zoo("edges.TokenWeight", batch_sizes=[16]))


def test_data_that_depend_on_the_batch_size_have_scores_of_their_own(zoo):
    alone = zoo(data=spec("edges.Trimmed", n=170), batch_sizes=[64], sparsities=[0.8], **NEVER)
    assert_works(alone, ["incomplete"])
    (expected,) = alone.results
    shutil.rmtree(alone.folder / "mlruns")
    both = zoo(data=spec("edges.Trimmed", n=170), batch_sizes=[16, 64], sparsities=[0.8], **NEVER)
    assert_works(both, ["incomplete"])
    assert [r.trial.cell.batch_size for r in both.results] == [16, 64]
    assert (both.results[1].kept, both.results[1].curve) == (expected.kept, expected.curve)
    assert both.results[0].kept != expected.kept


def test_a_sampler_without_an_end(zoo):
    assert_refused(zoo(data="edges.Endless"), "data", "finite")


@pytest.mark.parametrize("exclude", [pytest.param([], marks=pytest.mark.long), ["model_of_old.*"]])
def test_a_frozen_copy_is_pruned_with_the_network_unless_it_is_excluded(zoo, exclude):
    outcome = zoo("edges.Distilled", pruning={"exclude": exclude}, **ONE, **NEVER)
    assert_works(outcome, ["incomplete"])
    (result,) = outcome.results
    assert not any(name.startswith("model_of_old") for name in result.kept)
    copied = sum(total for _, total in result.kept.values())
    assert result.flags.get("copies", 0) == (0 if exclude else copied)
    assert ("weights in copies of the pruned network" in outcome.out) is (exclude == [])


@pytest.mark.long
def test_layers_that_begin_equal_have_masks_of_their_own(zoo):
    outcome = zoo("edges.Twins", pruning={"exclude": ["body.1.*"]}, **ONE, **NEVER)
    assert_works(outcome, ["incomplete"])
    (result,) = outcome.results
    assert "copies" not in result.flags
    weights = outcome.audit(result).start.tensors
    assert (weights["body.1.weight"] != 0).all() and (weights["body.3.weight"] == 0).any()


def test_a_module_that_asks_for_a_folder(zoo):
    outcome = zoo("edges.WritesFiles", noise_scale=False, **ONE, **NEVER)
    assert_works(outcome, ["incomplete"])
    assert [path.read_text() for path in outcome.folder.glob("trials/*/point-0/ended")] == ["20"]


def test_batches_accumulated_by_hand_are_no_batch_size(zoo):
    assert_refused(zoo("edges.ByHand"), r"study\.batch_size_key", "32 examples")


def test_examples_in_another_dimension(zoo):
    outcome = zoo("edges.OnFeaturesFirst", "edges.TimeFirst", **NEVER)
    assert outcome.code == ExitCode.NO_RESULT, outcome.err
    assert {result.status for result in outcome.results} == {"incomplete"}
    assert all(result.flags == {} for result in outcome.results)
