"""Schedule-free rules: against the authors' steps, the weights that are checked, and refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.goal import Goal
from lit_dps.core.optimizer_kind import OptimizerKind
from lit_dps.core.trial import Cell
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, Rule, StackedUpdate
from lit_dps.optim.rule import at_gradient_point
from lit_dps.pruning.mask_changes import mask_optimizer_state
from lit_dps.testing import check_rule
from lit_dps.training import PruningCallback
from lit_dps.training.optimizer_groups import group_rule
from tests.support import tiny
from tests.support.conformance import assert_conform
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.runs import train, train_one
from tests.support.user_readings import Redraws  # noqa: F401  a method by class path
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, trials, workload

NAMES = ("schedule_free_sgd", "schedule_free_adamw")
BETA1, BETA2, EPSILON, DECAY, RATE, STEPS = 0.9, 0.95, 1e-8, 0.1, 0.1, 12
NUMBERS = {
    "momentum": BETA1,
    "beta1": BETA1,
    "beta2": BETA2,
    "epsilon": EPSILON,
    "weight_decay": DECAY,
}
CURVATURE = torch.tensor([[3.0, 1.0, 0.2], [1.0, 2.0, 0.5], [0.2, 0.5, 1.0]]).double()
START = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.5, -1.0]]).double()
GOAL = {"error": 0.01, "check_interval": 4, "max_steps": 24}
WAYS = {"single": {}, "lightning": {"lean": False}, "stacked": {"size": 2}}


def rate_at(step: int) -> float:
    """A warm-up of four steps."""
    return RATE * min(1.0, (step + 1) / 4)


def make(name: str, parameter: nn.Parameter) -> torch.optim.Optimizer:
    numbers = {key: NUMBERS[key] for key in RULES[name].hyperparameters}
    return RULES[name].make([parameter], RATE, numbers)


def quadratic(weights: Tensor) -> Tensor:
    return 0.5 * (weights @ CURVATURE * weights).sum()


def trained(name: str, steps: int = STEPS) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(START.clone())
    optimizer = make(name, parameter)
    take_steps(optimizer, parameter, range(steps))
    return parameter, optimizer


def take_steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: range) -> None:
    def closure() -> Tensor:
        loss = quadratic(parameter)
        loss.backward()
        return loss

    for step in steps:
        optimizer.param_groups[0]["lr"] = rate_at(step)
        optimizer.step(closure)


def authors(name: str, steps: int = STEPS) -> Tensor:
    """x after steps on the quadratic, by the authors' reference code (70785b5)."""
    x, y, z = START.clone(), START.clone(), START.clone()
    second, weight_sum = torch.zeros_like(x), 0.0
    for step in range(steps):
        rate = rate_at(step)
        weight_sum += rate**2
        share = rate**2 / weight_sum
        gradient = y @ CURVATURE
        z = z - rate * DECAY * y
        if name == "schedule_free_adamw":
            second = BETA2 * second + (1 - BETA2) * gradient**2
            root = (second / (1 - BETA2 ** (step + 1))).sqrt() + EPSILON
            z = z - rate * gradient / root
        else:
            z = z - rate * gradient
        x = (1 - share) * x + share * z
        y = BETA1 * x + (1 - BETA1) * z
    return x


@pytest.mark.parametrize("name", NAMES)
def test_they_conform(name):
    check_rule(RULES[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_the_average_of_the_authors(name):
    parameter, _ = trained(name)
    torch.testing.assert_close(parameter.detach(), authors(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_taken_between_the_average_and_z(name):
    parameter, optimizer = trained(name, 3)
    x, z = parameter.detach().clone(), optimizer.state[parameter]["z"].clone()
    seen = []

    def closure() -> float:
        seen.append(parameter.detach().clone())
        parameter.grad = torch.zeros_like(parameter)
        return 0.0

    optimizer.step(closure)
    torch.testing.assert_close(seen[0], BETA1 * x + (1 - BETA1) * z, rtol=1e-14, atol=1e-14)
    assert not torch.equal(seen[0], x)


def test_at_a_constant_rate_x_is_the_mean_of_all_z():
    parameter = nn.Parameter(START.clone())
    optimizer = RULES[NAMES[0]].make([parameter], RATE, {"momentum": 0.0, "weight_decay": 0.0})
    z, all_z = START, []

    def closure() -> None:
        parameter.grad = parameter.detach() @ CURVATURE

    for _ in range(STEPS):
        optimizer.step(closure)
        # Without momentum y is z, which SGD moves.
        z = z - RATE * z @ CURVATURE
        all_z.append(z)
    expected = torch.stack(all_z).mean(0)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_saved_goes_on_to_the_bit(name):
    unbroken, _ = trained(name)
    parameter, optimizer = trained(name, 5)
    resumed = nn.Parameter(parameter.detach().clone())
    other = make(name, resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(other, resumed, range(5, STEPS))
    assert torch.equal(resumed, unbroken)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_other_weights_are_refused(name):
    parameter, optimizer = trained(name, 2)
    quadratic(parameter).backward()
    with refuses("model.optimizer", name):
        optimizer.step()
    with refuses("model.optimizer", name):
        optimizer.step(lambda: 0.0)
    parameter.grad = None
    with at_gradient_point(optimizer):
        quadratic(parameter).backward()
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), with_last_rate(name, 3))


def with_last_rate(name: str, steps: int) -> Tensor:
    """x after steps, the last of which has the rate of the one before."""
    other = nn.Parameter(START.clone())
    optimizer = make(name, other)
    take_steps(optimizer, other, range(steps - 1))
    last = optimizer.param_groups[0]["lr"]

    def closure() -> None:
        quadratic(other).backward()

    optimizer.param_groups[0]["lr"] = last
    optimizer.step(closure)
    return other.detach()


def test_a_rule_with_an_optimizer_of_its_own_has_no_other_point():
    rule = RULES[NAMES[0]]
    with pytest.raises(TypeError):
        Rule(
            "other",
            (),
            (),
            rule.update_,
            make=lambda parameters, rate, numbers: torch.optim.SGD(parameters, rate),
            is_of=lambda optimizer: False,
            gradient_point=rule.gradient_point,
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_moving_mask_prunes_z_too(name):
    parameter, optimizer = trained(name, 3)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).double()
    before = optimizer.state[parameter]["z"].clone()
    mask_optimizer_state(optimizer, [(parameter, mask)])
    state = optimizer.state[parameter]
    assert torch.equal(state["z"], before * mask)
    assert float(state["sum_of_squared_rates"]) == pytest.approx(RATE**2 * (1 + 4 + 9) / 16)


class Noisy(Callback):
    """Changes all gradients after they were masked."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            parameter.grad.add_(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_a_callback_changes_do_not_revive_pruned_weights(name):
    module = ImageClassifier(MLP(hidden=[8]), optimizer=name, learning_rate=0.01)
    pruning = PruningCallback(0.8, "random")
    data = Digits(batch_size=16)
    trainer = tiny.fit(module, datamodule=data, callbacks=[pruning, Noisy()], max_steps=3)
    (optimizer,) = trainer.optimizers
    for parameter_name, parameter in module.named_parameters():
        if parameter_name in pruning.mask:
            z = optimizer.state[parameter]["z"]
            assert not z[~pruning.mask[parameter_name].bool()].any() and z.any()


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_16_bits_are_refused(name):
    parameter = nn.Parameter(START.bfloat16())
    optimizer = make(name, parameter)
    with refuses("model.optimizer"):
        optimizer.step(lambda: parameter.sum().backward())


def test_the_kinds_are_those_of_their_base():
    kinds = []
    for name in NAMES:
        _, optimizer = trained(name, 1)
        kinds.append(group_rule(optimizer, optimizer.param_groups[0]))
    assert [rule.kind for rule in kinds] == [OptimizerKind.SGD_LIKE, OptimizerKind.ADAPTIVE]
    assert kinds[1].scales_decay
    assert kinds[1].second_moment is not None and kinds[1].second_moment.name == "beta2"


def used(name: str):
    return workload(optimizer=name, weight_decay=0.01, warmup_steps=5)


def asked(name: str, *cells: Cell):
    rates = {"schedule_free_sgd": [0.5, 0.3], "schedule_free_adamw": [0.01, 0.005]}[name]
    return trials(*(cells or (Cell(16, 0.8),)), rates=rates)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("method", ["", f"{__name__}.Redraws"])
@pytest.mark.parametrize("name", NAMES)
def test_all_loops_check_the_same_weights(name, method, early):
    pruning = {"method": method} if method else {}
    goal = {**GOAL, "early_reject": early}
    results = {}
    for way, options in WAYS.items():
        results[way] = train(asked(name), used(name), goal, **options, pruning=pruning)
        assert {result.engine for result in results[way]} == {way}
    for single, lightning in zip(results["single"], results["lightning"], strict=True):
        assert single.curve == lightning.curve
    conform = assert_conform(
        results["stacked"], results["lightning"], Goal.from_dict(GOAL), EXAMPLES
    )
    assert conform == []


def test_with_late_gradients_all_loops_check_the_same_weights():
    cell = Cell(16, 0.5, (("optim.delay", 2),))
    results = {}
    for way, options in WAYS.items():
        results[way] = train(asked(NAMES[0], cell), used(NAMES[0]), GOAL, **options)
        assert {result.engine for result in results[way]} == {way}
    for single, lightning in zip(results["single"], results["lightning"], strict=True):
        assert single.curve == lightning.curve
    conform = assert_conform(
        results["stacked"], results["lightning"], Goal.from_dict(GOAL), EXAMPLES
    )
    assert conform == []


def on_a_rank() -> tuple:
    result = train_one(asked(NAMES[1])[0], used(NAMES[1]), GOAL, lean=False)
    return result.status, [round(error, 4) for error in result.curve["val_error"]]


def test_two_ranks_check_the_weights_of_one_process():
    assert same_on_ranks(2, on_a_rank) == on_a_rank()


def test_local_sgd_is_refused():
    for options in ({}, {"lean": False}):
        result = train_one(
            asked(NAMES[0])[0], used(NAMES[0]), GOAL, local={"workers": 2, "steps": 4}, **options
        )
        assert result.failure is not None and "local.workers" in result.failure


class Line(LightningModule):
    """A weight of 1, whose loss is w^2 / 2."""

    def __init__(self, manual: bool = False):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.line.weight)
        self.automatic_optimization = not manual
        self.validated: list[float] = []
        self.trained: list[float] = []

    def training_step(self, batch, batch_idx):
        self.trained.append(self.line.weight.item())
        loss = 0.5 * self.line(batch[0]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        if not batch_idx:
            self.validated.append(self.line.weight.item())
        self.log("val_error", self.line(batch[0]).abs().mean())

    def configure_optimizers(self):
        numbers = {"momentum": BETA1, "weight_decay": 0.0}
        return RULES[NAMES[0]].make(self.parameters(), RATE, numbers)


def fit(module: Line, steps: int = 6, **options) -> Trainer:
    data = DataLoader(TensorDataset(torch.ones(8 * steps, 1)), batch_size=8)
    options = {"val_check_interval": 1, **options}
    return tiny.fit(module, data, data, max_steps=steps, **options)


def line(steps: int) -> tuple[list[float], list[float]]:
    """x after each step, and y before it, by hand."""
    x = y = z = 1.0
    averages, points = [], []
    for step in range(steps):
        points.append(y)
        z -= RATE * y
        x += (z - x) / (step + 1)
        y = BETA1 * x + (1 - BETA1) * z
        averages.append(x)
    return averages, points


def test_a_plain_fit_validates_the_average_and_trains_at_the_point(tmp_path):
    module = Line()
    trainer = fit(module)
    averages, points = line(6)
    # The first validation precedes training.
    assert module.validated == pytest.approx([1.0, *averages], rel=1e-6)
    assert module.trained == pytest.approx(points, rel=1e-6)
    assert module.line.weight.item() == pytest.approx(averages[-1], rel=1e-6)
    path = tmp_path / "free.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]["line.weight"].item()
    assert saved == pytest.approx(averages[-1], rel=1e-6)


def test_a_plain_fit_that_is_resumed_equals_an_unbroken_one(tmp_path):
    path = tmp_path / "free.ckpt"
    fit(Line(), 3).save_checkpoint(path)
    resumed, unbroken = Line(), Line()
    fit(resumed, 6, ckpt_path=path)
    fit(unbroken, 6)
    assert resumed.line.weight.item() == unbroken.line.weight.item()


@pytest.mark.parametrize(
    ("manual", "options"), [(True, {}), (False, {"accumulate_grad_batches": 2})]
)
def test_manual_optimization_and_accumulated_batches_are_refused(manual, options):
    with refuses("model.optimizer", NAMES[0]):
        fit(Line(manual), **options)


def test_the_result_does_not_depend_on_readings():
    (trial, _) = asked(NAMES[0])
    plain = train_one(trial, used(NAMES[0]), GOAL)
    norms = []
    for options in ({}, {"lean": False}):
        read = train_one(trial, used(NAMES[0]), GOAL, readings=["gradient_norm"], **options)
        assert read.curve["val_error"] == plain.curve["val_error"]
        norms.append(read.readings["gradient_norm"]["gradient_norm"])
    assert len(norms[0]) == 6 and all(map(math.isfinite, norms[0]))
    assert norms[0] == pytest.approx(norms[1])


def test_the_points_of_a_stack_are_those_of_the_optimizer_with_groups():
    first, second = nn.Parameter(START.clone()), nn.Parameter(START[0].clone())
    rule = RULES[NAMES[0]]
    scalar = nn.Parameter(torch.tensor(1.5).double())
    groups = [{"params": [second, scalar], "momentum": 0.3}, {"params": [first]}]
    optimizer = rule.make(groups, RATE, {"momentum": BETA1, "weight_decay": 0.0})

    def closure() -> None:
        (quadratic(first) + scalar * quadratic(second[None])).backward()

    for _ in range(3):
        optimizer.step(closure)
    named = {"first": first, "second": second, "scalar": scalar}
    parameters = {name: parameter.detach() for name, parameter in named.items()}
    update = StackedUpdate(rule, parameters, [["second", "scalar"], ["first"]])
    state = update.flat_state(named, optimizer.state)
    numbers = {"momentum": torch.tensor([[0.3, BETA1]]).double()}
    numbers["weight_decay"] = torch.zeros(1, 2).double()
    flat = update.weights.flatten(parameters)[None]
    points = update.gradient_points(
        flat, {key: tensor[None] for key, tensor in state.items()}, numbers
    )
    with at_gradient_point(optimizer):
        expected = {name: parameter.detach().clone() for name, parameter in named.items()}
    torch.testing.assert_close(points[0], update.weights.flatten(expected))
    assert not torch.equal(points, flat)


def _ahead(weights, gradients, state, rate, hyperparameters, step):
    state["sum"].add_(gradients)
    weights.addcmul_(gradients, rate, value=-1)


AHEAD = Rule(
    "ahead",
    (),
    ("sum",),
    _ahead,
    make_state=lambda parameter: {"sum": torch.ones_like(parameter)},
    gradient_point=lambda weights, state, hyperparameters: weights + 0.5 * state["sum"],
)


def test_the_first_point_is_of_the_initial_state_as_in_a_stack():
    parameter = nn.Parameter(START.clone())
    optimizer = AHEAD.make([parameter], RATE, {})
    update = StackedUpdate(AHEAD, {"w": parameter})
    state = {key: each[None] for key, each in update.flat_state({"w": parameter}, {}).items()}
    row = update.weights.flatten({"w": parameter.detach()})[None]
    for step in range(3):
        point = update.gradient_points(row, state, {})
        with at_gradient_point(optimizer):
            assert torch.equal(parameter.detach().flatten(), point[0])
            quadratic(parameter).backward()
        gradients = parameter.grad.flatten()[None].clone()
        optimizer.step()
        update(
            row, gradients, state, row.new_full((1, 1), RATE), {}, row.new_full((1, 1), step + 1)
        )
        assert torch.allclose(parameter.detach().flatten(), row[0], rtol=1e-12)


def test_gradients_of_the_weights_are_no_gradients_of_another_first_point():
    parameter = nn.Parameter(START.clone())
    optimizer = AHEAD.make([parameter], RATE, {})
    quadratic(parameter).backward()
    with refuses("model.optimizer", "ahead"):
        optimizer.step(lambda: quadratic(parameter))


def test_a_frozen_parameter_has_no_other_point():
    parameter = nn.Parameter(START.clone(), requires_grad=False)
    with at_gradient_point(AHEAD.make([parameter], RATE, {})):
        assert torch.equal(parameter, START)


@pytest.mark.parametrize("name", ["lion", "muon", "soap"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_rules_of_lit_dps_refuse_weights_of_16_bits(name, kind):
    parameter = nn.Parameter(START.to(kind))
    numbers = {**NUMBERS, "adamw_ratio": 1.0, "refresh_steps": 10}
    numbers = {key: numbers[key] for key in RULES[name].hyperparameters}
    optimizer = RULES[name].make([parameter], RATE, numbers)
    parameter.grad = torch.ones_like(parameter)
    with refuses("model.optimizer", name) as refused:
        optimizer.step()
    assert str(kind) in refused.value.allowed
