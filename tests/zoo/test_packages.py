"""Networks of public packages; each test is skipped where its package is not installed."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

ONE = {"batch_sizes": [16], "goal": {"error": 0.41, "max_steps": 30}}


@pytest.mark.parametrize("zero_init_last", [True, False])
def test_a_residual_network(zoo, zero_init_last):
    pytest.importorskip("timm")
    model = spec("packages.SmallResNet", zero_init_last=zero_init_last)
    outcome = zoo(model, "packages.Pictures", sparsities=[0.0, 0.4], **ONE)
    assert_works(outcome)
    dense, sparse = outcome.results
    assert not any("bn" in name for name in sparse.kept)
    assert ("kept_with_score_0" in sparse.flags) == zero_init_last


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_language_model(zoo, kind):
    pytest.importorskip("transformers")
    outcome = zoo(spec("packages.LanguageModel", kind=kind), "packages.Sentences", **ONE)
    assert_works(outcome)
    names = set(outcome.results[1].kept)
    assert not any("norm" in name or ".ln_" in name for name in names)
    assert ("net.lm_head.weight" in names) == (kind == "llama")


def test_a_module_made_for_the_other_lightning(zoo):
    pytest.importorskip("lightly.utils.benchmarking")
    refused = zoo(spec("lightly.utils.benchmarking.LinearClassifier"))
    assert_refused(refused, "pytorch_lightning", "LinearClassifier")
