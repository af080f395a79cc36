"""Modules that are made in other ways, or come from another package."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

ONE = {"batch_sizes": [16]}


def test_keywords_that_are_handed_on(zoo):
    outcome = zoo(spec("foreign.Keywords", gain=2.0, width=24), **ONE)
    assert_works(outcome)
    assert outcome.audit(outcome.results[0]).start.tensors["head.weight"].shape == (4, 24)


@pytest.mark.long
def test_a_function_with_keywords_that_no_signature_tells_of(zoo):
    outcome = zoo({**spec("foreign.make_net", lr=0.01), "dict_kwargs": {"hidden": 24}}, **ONE)
    assert_works(outcome)
    for result in outcome.results:
        assert outcome.audit(result).start.tensors["head.weight"].shape == (4, 24)
        assert outcome.audit(result).rates[0] == pytest.approx(result.trial.params["model.lr"])


def test_a_space_over_a_keyword_that_no_signature_tells_of(zoo):
    space = {"model.dict_kwargs.hidden": {"low": 8, "high": 32, "integer": True}}
    model = {**spec("foreign.make_net", lr=0.01), "dict_kwargs": {"hidden": 24}}
    outcome = zoo(model, space=space, trials=2, **ONE)
    assert_works(outcome)
    for result in outcome.results:
        width = outcome.audit(result).start.tensors["head.weight"].shape[1]
        assert width == result.trial.params["model.dict_kwargs.hidden"]


def test_a_module_of_the_other_lightning(zoo):
    pytest.importorskip("pytorch_lightning")
    assert_refused(zoo("elsewhere.Elsewhere"), "pytorch_lightning", r"lightning\.pytorch")
