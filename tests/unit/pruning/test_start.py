"""pruning.init: the weights that are trained from under a mask, alike in all engines, on ranks and
after a resume."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lit_dps.core.errors import is_about
from lit_dps.core.trial import Cell, Trial
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.pruning import Mask, prunable
from lit_dps.pruning.isometry import distances
from lit_dps.pruning.start import initialize_pruned
from lit_dps.training import PruningCallback
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.pruners import mask, network, small
from tests.support.ranks import same_on_ranks
from tests.support.runs import train, train_one
from tests.support.saved_study import Study
from tests.support.setups import training_of
from tests.unit.engines.test_engine import PARAMS, quiet  # noqa: F401
from tests.unit.pruning.test_pruners_engines import GOAL, WORKLOAD
from tests.unit.pruning.test_pruners_engines import PARAMS as RATES

INITS = ["original", "reinit", "isometry", "scaled_by_density"]
SPECTRUM = [
    f"jacobian_{name}_{when}"
    for when in ("before", "after")
    for name in ("mean", "spread", "condition")
]


def same(one, other) -> bool:
    return dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


@pytest.mark.parametrize("method", ["snip", "shuffle", "snap"])
@pytest.mark.parametrize("init", INITS)
def test_a_start_is_the_same_to_the_bit_in_both_engines_and_keeps_the_mask(init, method):
    trial, pruning = Trial(Cell(16, 0.8), 1, RATES), {"method": method, "init": init}
    ours, theirs = (
        train_one(trial, WORKLOAD, GOAL, lean=lean, pruning=pruning) for lean in (True, False)
    )
    assert same(ours, theirs)
    plain = train_one(trial, WORKLOAD, GOAL, pruning={"method": method})
    assert ours.kept == plain.kept and (ours.curve == plain.curve) is (init == "original")
    assert (set(SPECTRUM) <= set(ours.flags)) is (init == "isometry")


def test_stacked_trials_may_start_differently():
    trials = [Trial(Cell(16, 0.8, (("pruning.init", init),)), 1, RATES) for init in INITS]
    stacked = {result.trial.cell: result for result in train(trials, WORKLOAD, GOAL, size=3)}
    for trial in trials:
        alone, other = train_one(trial, WORKLOAD, GOAL), stacked[trial.cell]
        assert "stacked" in other.flags and alone.flags.items() <= other.flags.items()
        assert other.curve["train_loss"] == pytest.approx(alone.curve["train_loss"], rel=1e-4)


def test_new_weights_are_those_of_the_same_class_under_another_seed_and_the_point_decides():
    training = training_of(WORKLOAD, GOAL, {"init": "reinit"})
    trial, other = Trial(Cell(16, 0.8), 1, RATES), Trial(Cell(32, 0.5), 1, RATES)
    built = training.workload.build(trial)
    found = Mask({name: torch.rand(p.shape) < 0.3 for name, p in prunable(built.module).items()})
    initialize_pruned("reinit", built.module, found, None, training.pruning_callback(trial).redraw)
    expected = training.workload.module(other, "reinit").state_dict()
    scored = training.workload.build(trial).module.state_dict()
    for name, weights in built.module.state_dict().items():
        assert torch.equal(weights, expected[name] * found[name])
        assert not weights.any() or not torch.equal(weights, scored[name] * found[name])
    first, second = (
        training.workload.module(Trial(Cell(16, 0.8), i, RATES), "reinit") for i in (1, 2)
    )
    assert not torch.equal(*(m.network.layers[1].weight for m in (first, second)))


def test_at_sparsity_0_nothing_starts_otherwise():
    dense = [
        train_one(Trial(Cell(16, 0.0), 1, RATES), WORKLOAD, GOAL, pruning={"init": init})
        for init in INITS
    ]
    assert all(same(dense[0], other) for other in dense[1:])


def test_weights_are_scaled_by_the_root_of_the_density_of_their_tensor():
    module, net = small(), network(small())
    found = mask("snip", net, 0.9)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert initialize_pruned("scaled_by_density", module, found, lambda: nullcontext(net)) == {}
    scaled = 0
    for name, parameter in module.named_parameters():
        keep = found[name]
        factor = 1.0
        if keep.ndim >= 2:
            scaled += 1
            factor = float(keep.float().mean()) ** -0.5
        expected = before[name] * keep * factor
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)
    assert scaled >= 2


def test_under_a_random_mask_the_scaled_layer_has_the_variance_of_the_dense_one():
    torch.manual_seed(0)
    layer, x = nn.Linear(2000, 500, bias=False), torch.randn(200, 2000)
    dense = layer(x).var().item()
    for density in (0.5, 0.1, 0.01):
        pruned = nn.Linear(2000, 500, bias=False)
        pruned.load_state_dict(layer.state_dict())
        found = Mask({"weight": torch.rand(500, 2000) < density})
        initialize_pruned("scaled_by_density", pruned, found, None)
        assert pruned(x).var().item() == pytest.approx(dense, rel=0.04)


def test_a_tensor_that_is_fully_pruned_stays_zero():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found = Mask(
        {"0.weight": torch.zeros(4, 3, dtype=torch.bool), "1.weight": torch.ones(2, 4) > 0}
    )
    before = module[1].weight.detach().clone()
    initialize_pruned("scaled_by_density", module, found, None)
    assert not module[0].weight.any() and torch.equal(module[1].weight, before)


def test_isometry_moves_kept_weights_alone_towards_orthogonal_layers_and_measures_the_jacobian():
    module, net = small(), network(small())
    found = mask("snip", net, 0.9)
    biases = {name: p.detach().clone() for name, p in module.named_parameters() if p.ndim == 1}
    parameters = dict(module.named_parameters())
    far = distances(parameters, found)
    seen = initialize_pruned("isometry", module, found, lambda: nullcontext(net))
    near = distances(parameters, found)
    assert seen["isometry_distance_before"] == pytest.approx(sum(far.values()), rel=1e-5)
    assert seen["isometry_distance_after"] == pytest.approx(sum(near.values()), rel=1e-5)
    assert sum(near.values()) < 0.95 * sum(far.values()) and all(
        near[name] <= far[name] for name in far
    )
    for name, keep in found.items():
        assert not parameters[name][~keep].any()
        assert name not in biases or torch.equal(parameters[name], biases[name] * keep)
    x = next(net.batches())[0][0]
    values = torch.linalg.svdvals(
        torch.func.vmap(torch.func.jacrev(lambda x: module(x[None])[0]))(x).flatten(2)
    )
    assert seen["jacobian_mean_after"] == pytest.approx(values.mean().item(), rel=1e-4)
    assert seen["jacobian_spread_after"] == pytest.approx(values.std(correction=0).item(), rel=1e-4)


def test_where_no_vector_comes_out_the_jacobian_is_left_out():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Unflatten(1, (2, 3)))
    net = network(module)
    seen = initialize_pruned(
        "isometry", module, mask("magnitude", net, 0.5), lambda: nullcontext(net)
    )
    assert set(seen) == {"isometry_distance_before", "isometry_distance_after"}


class Constant(ImageClassifier):
    """Weights that no seed decides."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9):
        super().__init__(MLP(hidden=(8,)), "momentum", learning_rate, momentum)
        for i, p in enumerate(self.parameters()):
            nn.init.constant_(p, 0.01 * i)


class Loaded(ImageClassifier):
    """Weights that are read when training begins."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9):
        super().__init__(MLP(hidden=(8,)), "momentum", learning_rate, momentum)

    def setup(self, stage):
        nn.init.constant_(self.network.layers[1].weight, 0.01)


class Biases(ImageClassifier):
    """Trains biases alone."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9):
        super().__init__(MLP(hidden=(8,)), "momentum", learning_rate, momentum)
        for p in self.parameters():
            p.requires_grad_(p.ndim == 1)


@pytest.mark.parametrize(
    ("kind", "init"), [(Constant, "reinit"), (Loaded, "reinit"), (Biases, "isometry")]
)
def test_what_cannot_start_so_is_refused_in_a_line(kind, init):
    model = {"class_path": f"{__name__}.{kind.__name__}", "init_args": {}}
    workload = Workload(model, WORKLOAD.data, WORKLOAD.trainer)
    method = {"method": "random", "init": init}
    for lean in (True, False):
        result = train_one(
            Trial(Cell(16, 0.5), 0, RATES), workload, GOAL, lean=lean, pruning=method
        )
        assert is_about(result.failure, "pruning.init")
        assert repr(init) in result.failure and kind.__name__ in result.failure
        assert "\n" not in result.failure


def test_an_unknown_start_and_new_weights_outside_of_a_study_are_refused():
    with refuses("pruning.init", "new"):
        PruningCallback(0.5, init="new")
    module = ImageClassifier(MLP((1, 28, 28), (8,)))
    trainer = Trainer(
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PruningCallback(0.5, init="reinit")],
    )
    with refuses("pruning.init", "reinit"):
        trainer.fit(module, datamodule=Digits(batch_size=16))


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("init", ["reinit", "isometry"])
def test_a_run_goes_on_with_the_weights_that_it_started_from(tmp_path, init, lean):
    study, trial = (
        Study(tmp_path, pruning={"init": init}, lean=lean),
        Trial(Cell(100, 0.9), 1, PARAMS),
    )
    whole, reference = study.run(trial, saved=False)
    study.run(trial, interrupt=2)
    result, steps = study.run(trial)
    assert study.said and result == whole and torch.equal(steps.weights, reference.weights)
    assert result.flags == whole.flags


def on_a_rank(init: str) -> tuple:
    result = train_one(
        Trial(Cell(16, 0.8), 1, RATES), WORKLOAD, GOAL, lean=False, pruning={"init": init}
    )
    return result.kept, result.curve["train_loss"], result.flags


@pytest.mark.parametrize("init", ["reinit", "isometry"])
def test_two_ranks_start_as_one_process_does(init):
    kept, losses, observed = same_on_ranks(2, on_a_rank, init)
    alone = on_a_rank(init)
    assert kept == alone[0] and losses == pytest.approx(alone[1], rel=1e-4)
    for name, value in alone[2].items():
        assert observed[name] == pytest.approx(value, rel=1e-5)
