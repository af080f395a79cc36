"""The search space and the study may not set the same thing."""

from __future__ import annotations

import pytest

from tests.zoo.run import RATES, spec
from tests.zoo.verify import assert_refused, assert_works

SIZES = {"low": 4, "high": 64, "integer": True}


@pytest.mark.parametrize("key", ["data.batch_size", "data.init_args.batch_size"])
def test_a_space_over_the_batch_size(zoo, key):
    assert_refused(zoo(space={**RATES, key: SIZES}), "study.space", key, "batch_size")


def test_a_space_over_the_batch_size_by_its_longer_name(zoo):
    space = {**RATES, "data.batch_size": SIZES}
    assert_refused(
        zoo(space=space, batch_size_key="data.init_args.batch_size"), "study.space", "batch_size"
    )


def test_two_keys_of_the_same_thing(zoo):
    space = {**RATES, "model.init_args.lr": {"low": 0.1, "high": 0.2}}
    assert_refused(zoo(space=space), "study.space", r"model\.(init_args\.)?lr")


def test_a_space_over_the_seed_of_the_order(zoo):
    space = {**RATES, "data.order_seed": {"low": 0, "high": 9, "integer": True}}
    assert_refused(zoo(data="data.OwnOrder", space=space), "study.space", "order_seed")


@pytest.mark.long
def test_the_longer_name_of_a_key_does_as_well(zoo):
    space = {"model.init_args.lr": RATES["model.lr"]}
    assert_works(zoo(space=space, batch_size_key="data.init_args.batch_size", batch_sizes=[16]))


def test_whole_numbers_can_be_searched(zoo):
    outcome = zoo(
        space={**RATES, "model.width": {"low": 8, "high": 32, "integer": True}},
        batch_sizes=[16],
        trials=2,
    )
    assert_works(outcome)
    for result in outcome.results:
        assert (
            outcome.audit(result).start.tensors["head.weight"].shape[1]
            == result.trial.params["model.width"]
        )


def test_an_order_seed_is_drawn_for_each_point(zoo):
    outcome = zoo(data=spec("data.OwnOrder", order_seed=5), batch_sizes=[16], trials=2)
    assert_works(outcome)
    first = {r.trial.point: outcome.audit(r).start.batch[0].tolist() for r in outcome.results}
    assert first[0] != first[1]


@pytest.mark.long
def test_true_and_false_are_values_of_an_axis(zoo):
    outcome = zoo(
        data=spec("data.Clouds", n=150), grid={"data.drop_last": [True, False]}, batch_sizes=[16]
    )
    assert_works(outcome)
    assert [cell.axes for cell in outcome.study.cells] == 2 * [
        (("data.drop_last", False),),
        (("data.drop_last", True),),
    ]
