"""Which parts of a network are pruned, and which cannot be."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

NEVER = {"monitor": "val_loss", "error": 1e-6, "max_steps": 10}
SPARSE = {"goal": NEVER, "batch_sizes": [16], "sparsities": [0.8]}


def kept(outcome) -> set[str]:
    """Names of what a pruner chose among."""
    (result,) = outcome.results
    return set(result.kept)


# Other tests have Tied and BatchNorm.
@pytest.mark.long
@pytest.mark.parametrize("name", ["Tied", "BatchNorm", "Embedded", "Attentive"])
def test_networks_of_all_kinds(zoo, name):
    assert_works(zoo(f"parts.{name}", goal=NEVER))


def test_a_shared_weight_counts_once(zoo):
    outcome = zoo("parts.Tied", **SPARSE)
    assert_works(outcome)
    assert "body.2.weight" in kept(outcome) and "body.4.weight" not in kept(outcome)


@pytest.mark.parametrize(
    ("by", "said"), [("weight_norm", "norm"), ("old", "norm"), ("orthogonal", "orthogonal")]
)
def test_a_parametrization_that_zeros_would_break(zoo, by, said):
    assert_refused(zoo(spec("parts.Parametrized", by=by)), said, r"body\.2")


@pytest.mark.long
@pytest.mark.parametrize("by", [pytest.param("weight_norm", marks=pytest.mark.long), "orthogonal"])
def test_without_pruning_any_parametrization_does(zoo, by):
    assert_works(zoo(spec("parts.Parametrized", by=by), sparsities=[0.0], batch_sizes=[16]))


def test_a_spectral_norm_keeps_zeros(zoo):
    outcome = zoo(spec("parts.Parametrized", by="spectral_norm"), goal=NEVER)
    assert_works(outcome)
    assert any("parametrizations" in name for result in outcome.results for name in result.kept)


def test_a_layer_that_does_not_know_its_size(zoo):
    assert_refused(zoo("parts.Lazy"), "lazy|uninitialized", r"body\.2")


@pytest.mark.long
def test_without_pruning_a_layer_may_learn_its_size(zoo):
    assert_works(zoo("parts.Lazy", sparsities=[0.0], batch_sizes=[16]))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("FrozenBackbone", {"head.weight", "head.bias"}),
        pytest.param(
            "HalfTrained",
            {"body.2.weight", "body.2.bias", "head.weight", "head.bias"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "OwnNorms",
            {
                f"{layer}.{part}"
                for layer in ("body.0", "body.5", "head")
                for part in ("weight", "bias")
            },
            marks=pytest.mark.long,
        ),
        (
            "BatchNorm",
            {f"{layer}.{part}" for layer in ("body.0", "head") for part in ("weight", "bias")},
        ),
    ],
)
def test_what_is_pruned(zoo, model, names):
    outcome = zoo(f"parts.{model}", **SPARSE)
    assert_works(outcome)
    assert kept(outcome) == names


def test_names_can_be_left_out(zoo):
    outcome = zoo("parts.Nested", pruning={"exclude": ["*.head.*"]}, **SPARSE)
    assert_works(outcome)
    assert kept(outcome) == {f"net.body.{i}.{part}" for i in (0, 2) for part in ("weight", "bias")}


def test_what_is_kept_without_a_score_is_told(zoo):
    outcome = zoo("parts.ZeroGamma", **SPARSE)
    assert_works(outcome)
    (result,) = outcome.results
    left = sum(n for n, _ in result.kept.values())
    scored = sum(total for name, (_, total) in result.kept.items() if "branch" not in name)
    assert 0 < left - scored <= result.flags["kept_with_score_0"] < left
    assert any("score 0" in line for line in outcome.out.splitlines() if line.startswith("note: "))


@pytest.mark.long
def test_where_all_have_a_score_nothing_is_told(zoo):
    outcome = zoo(**SPARSE)
    assert_works(outcome)
    assert "kept_with_score_0" not in outcome.results[0].flags and "score 0" not in outcome.out
