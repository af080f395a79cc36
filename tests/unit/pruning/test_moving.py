"""RigL, SET, gradual pruning and SNIP-it during training: masks and schedules by value."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lit_dps.analysis.readings import densities
from lit_dps.core.trial import Cell, Trial
from lit_dps.models import MLP
from lit_dps.pruning import Mask, MaskUpdate, prunable, pruner_of
from lit_dps.testing import check_pruner
from tests.support.errors import refuses
from tests.support.pruners import mask, network
from tests.support.runs import train_one
from tests.unit.pruning.test_pruners_engines import GOAL, WORKLOAD


def update(step=10, max_steps=100, sparsity=0.5, seed=0, **tensors) -> MaskUpdate:
    """Return a moment at which one tensor "w" may change; `tensors` replace its own."""
    tensors = {"mask": [1, 1, 1, 1, 0, 0], "weights": [4, 3, 2, 1, 0, 0], **tensors}
    tensors = {"gradients": [0, 0, 0, 5, 1, 2], **tensors}
    return MaskUpdate(
        step=step,
        max_steps=max_steps,
        sparsity=sparsity,
        mask=Mask({"w": torch.tensor(tensors["mask"]).bool()}),
        weights={"w": torch.tensor(tensors["weights"]).double()},
        gradients={"w": torch.tensor(tensors["gradients"]).double()},
        generator=torch.Generator().manual_seed(seed),
    )


def after(method: str, moment: MaskUpdate, **options) -> list[int]:
    return pruner_of(method, options).next_mask(moment)["w"].int().tolist()


@pytest.mark.parametrize("method", ["rigl", "set", "gradual", "snip_it_during"])
@pytest.mark.parametrize("every", [5, 100])
def test_the_methods_conform(method, every):
    check_pruner(method, {"every": every})


def test_erdos_renyi_counts_are_those_of_the_reference():
    """LeNet-300-100 at S = 0.9: the last layer is dense, and epsilon = 25620 / 1484."""
    module = MLP()
    weights = dataclasses.replace(network(module), parameters=prunable(module, "keep"))
    counts = mask("rigl", weights, 0.9).kept()
    epsilon = (26_620 - 1_000) / (784 + 300 + 300 + 100)
    first, second = epsilon * (784 + 300), epsilon * (300 + 100)
    assert [kept for kept, _ in counts.values()] == [round(first), round(second), 1_000]
    assert sum(kept for kept, _ in counts.values()) == 26_620
    uniform = mask("set", weights, 0.9, start="uniform").kept()
    assert [kept for kept, _ in uniform.values()] == [23_520, 3_000, 100]


def test_biases_are_pruned_and_keep_what_does_not_fit_into_the_weights():
    module = MLP()  # 266,200 weights and 410 biases
    counts = mask("rigl", network(module), 0.9).kept()
    assert sum(kept for name, (kept, _) in counts.items() if name.endswith("bias")) == 0
    assert sum(kept for kept, _ in counts.values()) == 26_661
    counts = mask("rigl", network(module), 0.001).kept()
    biases = sum(kept for name, (kept, _) in counts.items() if name.endswith("bias"))
    assert biases == round(266_610 * 0.999) - 266_200


def test_rigl_drops_the_smallest_and_grows_the_largest_gradient():
    # A share of 0.5 of 4 weights: 2 and 1 drop. Growth takes 5 (just dropped) and 2.
    assert after("rigl", update(step=0), share=0.5) == [1, 1, 0, 1, 0, 1]
    # Gradients of kept weights do not count.
    moment = update(step=0, gradients=[9, 9, 0, 0, 1, 2])
    assert after("rigl", moment, share=0.5) == [1, 1, 0, 0, 1, 1]


def test_the_share_of_rigl_falls_along_a_cosine_and_ends():
    moment = update(
        mask=[1] * 100 + [0] * 100,
        weights=[*range(1, 101), *[0] * 100],
        gradients=[0] * 100 + [1] * 100,
    )
    for step in (0, 15, 30, 60, 74):
        changed = after("rigl", dataclasses.replace(moment, step=step), share=0.3, end=0.75)
        dropped = int(0.15 * (1 + math.cos(math.pi * step / 75)) * 100)
        assert changed[:dropped] == [0] * dropped and changed[dropped:100] == [1] * (100 - dropped)
        assert sum(changed) == 100
    for step in (75, 90):
        moment = dataclasses.replace(moment, step=step)
        assert after("rigl", moment) == moment.mask["w"].int().tolist()


def test_set_grows_at_random_and_replaces_a_constant_share():
    grown = torch.zeros(6)
    for seed in range(400):
        changed = after("set", update(seed=seed, step=99), share=0.5)
        assert changed[:2] == [1, 1] and sum(changed) == 4
        grown += torch.tensor(changed)
    # Two of the four candidates grow, each with probability 1/2.
    assert ((grown[2:] / 400 - 0.5).abs() < 0.1).all()


@pytest.mark.parametrize("begin, end", [(0.0, 0.5), (0.2, 0.8)])
def test_gradual_pruning_follows_the_cubic_schedule(begin, end):
    pruner = pruner_of("gradual", {"begin": begin, "end": end})
    for step in (0, 20, 30, 50, 80, 99):
        done = min(max((step - 100 * begin) / (100 * (end - begin)), 0), 1)
        expected = 0.9 + (0 - 0.9) * (1 - done) ** 3  # Equation 1 with s_i = 0
        assert pruner.sparsity_at(step, 100, 0.9) == pytest.approx(expected)


def test_gradual_pruning_removes_the_smallest_and_nothing_returns():
    moment = update(mask=[1, 1, 1, 1, 1, 0], weights=[4, 3, 2, 0, 0, 0], step=50)
    assert after("gradual", moment) == [1, 1, 1, 0, 0, 0]
    moment = update(mask=[1, 1, 1, 0, 1, 0], weights=[4, 3, 2, 0, 0, 0], sparsity=1 / 3, step=50)
    assert after("gradual", moment) == [1, 1, 1, 0, 1, 0]  # the fifth is 0, but kept


def test_snip_it_prunes_by_saliency_in_halvings():
    pruner = pruner_of("snip_it_during", {"every": 10, "rounds": 2})
    sparsities = [pruner.sparsity_at(step, 100, 0.9) for step in (10, 20, 30, 40, 90)]
    assert sparsities == pytest.approx([0.5, 0.7, 0.9, 0.9, 0.9])
    moment = update(mask=[1] * 6, weights=[1, 2, 3, 4, 5, 6], gradients=[-60, 5, 1, 0, 0.1, 1])
    assert after("snip_it_during", moment, every=10) == [1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "method, options",
    [
        ("rigl", {"share": 0}),
        ("rigl", {"end": 1.5}),
        ("set", {"start": "dense"}),
        ("gradual", {"begin": 0.5, "end": 0.5}),
        ("snip_it_during", {"rounds": 0}),
    ],
)
def test_options_out_of_range_are_refused(method, options):
    with refuses(f"pruning.options.{next(iter(options))}"):
        pruner_of(method, options)


@pytest.mark.parametrize("lean", [True, False])
def test_the_average_density_is_the_mean_over_the_steps(lean):
    """Gradual pruning to 0.8 within 12 of 16 steps, with changes after steps 3, 6, 9, 12, 15."""
    pruning = {"method": "gradual", "options": {"every": 3, "end": 0.75}}
    trial = Trial(Cell(16, 0.8), 0, {"model.learning_rate": 0.01})
    goal = {**GOAL, "max_steps": 16, "error": 0.001}
    result = train_one(trial, WORKLOAD, goal, lean=lean, pruning=pruning)
    total = sum(each for _, each in result.kept.values())
    sums = 3.0
    for step, steps in ((3, 3), (6, 3), (9, 3), (12, 4)):
        sparsity = 0.8 * (1 - (1 - step / 12) ** 3)
        sums += steps * round(total * (1 - sparsity)) / total
    expected = {"average_density": sums / 16, "final_density": round(total * 0.2) / total}
    assert densities(result) == pytest.approx(expected)
    # A trial that is cut after its last change has the density up to there, before it none.
    assert densities(dataclasses.replace(result, curve={"step": [12.0]})) == {}


def test_a_mask_that_stays_has_one_density():
    trial = Trial(Cell(16, 0.8), 0, {"model.learning_rate": 0.01})
    result = train_one(trial, WORKLOAD, GOAL, pruning={"method": "random"})
    assert densities(result) == pytest.approx({"average_density": 0.2, "final_density": 0.2}, 1e-2)
    assert densities(result)["average_density"] == densities(result)["final_density"]
