"""Several optimizers, and optimizers given by the configuration: a step is a batch in which one of
them stepped."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

MAGNITUDE = {"method": "magnitude"}
NEVER = {"monitor": "val_loss", "error": 1e-6}


@pytest.mark.parametrize(
    "every",
    [
        # A test below has both in each batch too.
        pytest.param({}, id="both in each batch", marks=pytest.mark.long),
        pytest.param({"critic_every": 3}, id="the critic now and then"),
        pytest.param(
            {"critic_every": 1, "classifier_every": 4},
            id="the classifier now and then",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_optimizers(zoo, every):
    outcome = zoo(spec("optimizers.Adversarial", **every), pruning=MAGNITUDE, goal=NEVER)
    assert_works(outcome, ["incomplete"])
    assert {len(outcome.audit(result).rates) for result in outcome.results} == {40}


@pytest.mark.long
def test_two_optimizers_reach_a_goal(zoo):
    outcome = zoo("optimizers.Adversarial", pruning=MAGNITUDE)
    assert_works(outcome)
    assert any(result.status == "complete" for result in outcome.results)


def test_two_optimizers_have_no_loss_for_snip(zoo):
    assert_refused(zoo("optimizers.Adversarial"), r"pruning\.method", "manual optimization")


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("optim.delay", r"optim\.delay is 2; it must be 0.* LBFGS"),
        ("local.workers", r"local\.workers is 2.* LBFGS"),
    ],
)
def test_an_optimizer_that_evaluates_the_loss_itself_takes_no_stale_gradient_and_no_workers(
    zoo, axis, said
):
    """Not after the first trials, in which no gradient is stale and nobody works apart."""
    assert_refused(
        zoo("optimizers.WithLBFGS", sparsities=[0.0], grid={axis: [int(axis != "optim.delay"), 2]}),
        said,
    )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("AdamW", marks=pytest.mark.long)])
def test_an_optimizer_and_a_schedule_by_class_path(zoo, optimizer):
    model = spec(
        "foreign.GivenOptimizer",
        optimizer={"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": 0.1}},
        scheduler={
            "class_path": "torch.optim.lr_scheduler.ExponentialLR",
            "init_args": {"gamma": 1.0},
        },
    )
    outcome = zoo(
        model, space={"model.optimizer.lr": {"low": 0.01, "high": 0.05}}, batch_sizes=[16]
    )
    assert_works(outcome)
    for result in outcome.results:
        assert outcome.audit(result).rates[0] == pytest.approx(
            result.trial.params["model.optimizer.lr"]
        )
