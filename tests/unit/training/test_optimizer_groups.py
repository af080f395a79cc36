"""Each kind of optimizer is known or measured, and its settings follow the batch size by its rule."""

from __future__ import annotations

import pytest
import torch

from lit_dps.core.optimizer_kind import OptimizerKind, common_rate_power, kind_of_name
from lit_dps.optim import Rule, RuleOptimizer
from lit_dps.training import AdamScalingCallback
from lit_dps.training.adam_scaling import AdamScales, adam_scales_of, scale_groups
from lit_dps.training.optimizer_groups import (
    describe_unlisted,
    group_rule,
    is_adaptive,
    mixed_rates_note,
)
from lit_dps.training.optimizer_measurement import Beta, measure
from tests.support.errors import refuses
from tests.support.tiny import Plain, Recorder, fit, loader

ADAPTIVE, SIGN, SPECTRAL, SGD_LIKE = (
    OptimizerKind.ADAPTIVE,
    OptimizerKind.SIGN,
    OptimizerKind.SPECTRAL,
    OptimizerKind.SGD_LIKE,
)


def matrix() -> list:
    return [torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))]


class Own(torch.optim.Optimizer):
    """An optimizer that no table has. Like most of other packages, it has attributes of its own."""

    def __init__(self, parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.update_(p, p.grad, group, self.state[p])


def average(state: dict, name: str, beta: float, value: torch.Tensor) -> torch.Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    return state[name]


class OwnAdamW(Own):
    """Its decay is decoupled, and its second moment is the third of its betas."""

    def update_(self, p, gradient, group, state):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        first = average(state, "first", group["betas"][0], gradient)
        second = average(state, "second", group["betas"][-1], gradient**2)
        p.sub_(group["lr"] * first / (second.sqrt() + 1e-12))


class OwnAdam(OwnAdamW):
    """Its weight decay is a part of the gradient."""

    def update_(self, p, gradient, group, state):
        coupled = gradient + group["weight_decay"] * p
        super().update_(p, coupled, {**group, "weight_decay": 0.0}, state)


class OwnLamb(Own):
    """The norm of its update is fixed. It has a second moment, and its decay sees no gradient."""

    def update_(self, p, gradient, group, state):
        first = average(state, "first", group["betas"][0], gradient)
        second = average(state, "second", group["betas"][1], gradient**2)
        direction = first / (second.sqrt() + 1e-12) + group["weight_decay"] * p
        p.sub_(group["lr"] * direction / direction.norm())


class OwnLion(Own):
    """Both betas average gradients."""

    def update_(self, p, gradient, group, state):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        beta1, beta2 = group["betas"]
        before = state.get("average", torch.zeros_like(gradient))
        p.sub_(group["lr"] * (beta1 * before + (1 - beta1) * gradient).sign())
        average(state, "average", beta2, gradient)


class OwnSGD(Own):
    def update_(self, p, gradient, group, state):
        p.sub_(group["lr"] * average(state, "first", group["betas"][0], gradient))


@pytest.mark.parametrize(
    ("name", "kind", "second_moment"),
    [
        ("Adadelta", ADAPTIVE, Beta("rho")),
        ("Adafactor", ADAPTIVE, None),
        ("Adagrad", ADAPTIVE, None),
        ("Adam", ADAPTIVE, Beta("betas", 1)),
        ("AdamW", ADAPTIVE, Beta("betas", 1)),
        ("Adamax", ADAPTIVE, Beta("betas", 1)),
        ("Muon", SPECTRAL, None),
        ("NAdam", ADAPTIVE, Beta("betas", 1)),
        ("RAdam", ADAPTIVE, Beta("betas", 1)),
        ("RMSprop", ADAPTIVE, Beta("alpha")),
        ("Rprop", SIGN, None),
        ("SGD", SGD_LIKE, None),
        ("ASGD", SGD_LIKE, None),
    ],
)
def test_the_classes_of_torch_are_known_and_a_measurement_agrees(name, kind, second_moment):
    optimizer = getattr(torch.optim, name)(matrix(), lr=0.01)
    (group,) = optimizer.param_groups
    rule = group_rule(optimizer, group)
    assert (rule.kind, rule.second_moment, rule.is_measured) == (kind, second_moment, False)
    measured = measure(optimizer, group)
    assert measured is not None and measured.grows is (kind is SGD_LIKE)
    if second_moment == Beta("betas", 1) and name != "RAdam":  # whose correction depends on beta2
        assert measured.second_moment == second_moment


@pytest.mark.parametrize(
    ("make", "decoupled"),
    [
        (torch.optim.Adam, False),
        (torch.optim.AdamW, True),
        (torch.optim.NAdam, False),
        (torch.optim.RMSprop, False),
        (torch.optim.Adagrad, False),
        (torch.optim.Muon, True),
        (torch.optim.Adafactor, True),
        (lambda p, **k: torch.optim.RAdam(p, decoupled_weight_decay=True, **k), True),
    ],
)
def test_only_a_decoupled_weight_decay_is_scaled(make, decoupled):
    """A decay that is a part of the gradient is a part of the loss, whatever the batch size."""
    optimizer = make(matrix(), lr=0.01, weight_decay=0.1)
    (group,) = optimizer.param_groups
    assert group_rule(optimizer, group).scales_decay is decoupled
    assert measure(optimizer, group).decoupled_decay is decoupled
    scale_groups(optimizer, 4, 2.0)
    assert group["weight_decay"] == pytest.approx(0.2 if decoupled else 0.1)


def test_groups_of_adamw_need_not_say_that_their_decay_is_decoupled():
    optimizer = torch.optim.AdamW(matrix(), lr=0.01, weight_decay=0.1)
    (group,) = optimizer.param_groups
    group.pop("decoupled_weight_decay", None)  # torch 2.6 has no such key
    assert group_rule(optimizer, group).scales_decay


@pytest.mark.parametrize(
    ("make", "kind", "second_moment", "decoupled"),
    [
        (OwnAdamW, ADAPTIVE, Beta("betas", 1), True),
        (lambda p: OwnAdamW(p, betas=(0.9, 0.9, 0.99)), ADAPTIVE, Beta("betas", 2), True),
        (OwnAdam, ADAPTIVE, Beta("betas", 1), False),
        (OwnLamb, ADAPTIVE, Beta("betas", 1), True),
        (OwnLion, ADAPTIVE, None, True),
        (OwnSGD, SGD_LIKE, None, False),
    ],
)
def test_an_unknown_optimizer_is_measured(make, kind, second_moment, decoupled):
    optimizer = make(matrix())
    (group,) = optimizer.param_groups
    before = group["params"][0].detach().clone()
    random_state = torch.get_rng_state()
    rule = group_rule(optimizer, group)
    assert (rule.kind, rule.second_moment, rule.scales_decay) == (kind, second_moment, decoupled)
    assert rule.is_measured and is_adaptive([optimizer]) is (kind is ADAPTIVE)
    # The measurement changes nothing.
    assert torch.equal(group["params"][0], before) and optimizer.count == 0
    assert not optimizer.state and torch.equal(torch.get_rng_state(), random_state)
    scale_groups(optimizer, 4, 2.0)
    betas = [0.9, 0.99] if len(group["betas"]) == 2 else [0.9, 0.9, 0.99]
    if second_moment is not None:
        betas[-1] = 0.99**4
    assert list(group["betas"]) == pytest.approx(betas)
    assert group["weight_decay"] == pytest.approx(0.2 if decoupled else 0.1)


def test_a_subclass_with_its_own_step_is_measured():
    class Signed(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data -= self.param_groups[0]["lr"] * p.grad.sign()

    class Renamed(torch.optim.SGD):
        pass

    assert is_adaptive([Signed(matrix(), 0.1)]) and not is_adaptive([Renamed(matrix(), 0.1)])
    assert describe_unlisted(Renamed(matrix(), 0.1)) == []
    (note,) = describe_unlisted(Signed(matrix(), 0.1))
    assert note.startswith("Signed was measured: its update does not grow")


def test_a_rule_of_this_package_is_known_by_its_name():
    def update_(weights, gradients, state, rates, hyperparameters, steps):
        weights -= rates * gradients.sign()

    for name, measured in (("lion", False), ("mine", True)):
        rule = Rule(name, ("beta1", "beta2"), (), update_)
        optimizer = RuleOptimizer(rule, matrix(), 0.1, {"beta1": 0.9, "beta2": 0.99})
        found = group_rule(optimizer, optimizer.param_groups[0])
        assert (found.is_listed, found.is_measured) == (not measured, True)
        assert found.second_moment is None and is_adaptive([optimizer])


def test_an_optimizer_that_cannot_be_measured_is_taken_for_adam_by_its_betas():
    class Fails(Own):
        def step(self, closure):
            raise RuntimeError("only on a GPU")

    class FailsAdamW8bit(Fails):
        pass

    for make, decoupled in ((Fails, False), (FailsAdamW8bit, True)):
        optimizer = make(matrix())
        rule = group_rule(optimizer, optimizer.param_groups[0])
        assert (rule.kind, rule.second_moment) == (ADAPTIVE, Beta("betas", 1))
        assert (rule.scales_decay, rule.is_measured) == (decoupled, False)
        (note,) = describe_unlisted(optimizer)
        assert "could not be measured" in note and note.endswith("like Adam.")


def test_notes_name_what_stays():
    (lion,) = describe_unlisted(OwnLion(matrix()))
    assert "None of its betas decays a second moment" in lion and "weight decay" not in lion
    (adam,) = describe_unlisted(OwnAdam(matrix()))
    assert adam.endswith("Its weight decay is a part of the gradient, so it stays.")
    sgd, adamw = torch.optim.SGD(matrix(), 0.1), torch.optim.AdamW(matrix())
    (mixed,) = mixed_rates_note([sgd, adamw])
    assert mixed.startswith("The rate of SGD grows with B, the rate of AdamW with sqrt(B).")
    assert mixed_rates_note([torch.optim.Muon(matrix()), adamw]) == []


def test_powers_of_the_rate():
    assert [kind.rate_power for kind in OptimizerKind] == [0.5, 0.5, 0.5, 1.0]
    assert common_rate_power([ADAPTIVE, SPECTRAL]) == 0.5
    assert common_rate_power([ADAPTIVE, SGD_LIKE]) is None
    names = ["torch.optim.AdamW", "my_lion.LION", "muon", "nesterov", "mine.Other"]
    expected = [ADAPTIVE, SIGN, SPECTRAL, SGD_LIKE, None]
    assert [kind_of_name(name) for name in names] == expected


def muon_and_adamw(parameters):
    matrices = [p for p in parameters if p.ndim == 2]
    assert matrices
    return torch.optim.Muon(matrices, lr=0.2, weight_decay=0.1), torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(3))], lr=0.03, betas=(0.9, 0.99), weight_decay=0.01
    )


class TwoOptimizers(Plain):
    def __init__(self, automatic: bool):
        super().__init__(make_optimizer=None)
        self.automatic_optimization = automatic

    def configure_optimizers(self):
        return list(muon_and_adamw(list(self.parameters())))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize(
    ("rate", "decays"),
    [
        # lambda (B / B0) (eta0 / eta), with B / B0 = 4. Only the rate of Muon is twice eta0.
        ([0.1, 0.03], (0.1 * 4 / 2, 0.01 * 4)),
        # The ratio of the first optimizer holds for both.
        (0.1, (0.1 * 4 / 2, 0.01 * 4 / 2)),
        (None, (0.1 * 4, 0.01 * 4)),
    ],
)
def test_each_of_two_optimizers_follows_its_own_rate(rate, decays):
    def settings(trainer, module):
        muon, adamw = (optimizer.param_groups[0] for optimizer in trainer.optimizers)
        return muon["weight_decay"], adamw["weight_decay"], adamw["betas"][1]

    seen = Recorder(settings)
    callbacks = [AdamScalingCallback(2, rate), seen]
    fit(TwoOptimizers(automatic=False), loader(batch_size=8), callbacks=callbacks, max_steps=2)
    assert seen.values[0] == pytest.approx((*decays, 0.99**4))


def test_the_rates_of_groups_that_differ_are_the_reference():
    adamw = torch.optim.AdamW([{"params": matrix()}, {"params": matrix(), "lr": 0.3}], lr=0.1)
    assert adam_scales_of([adamw]).reference_rates == [0.1, 0.3]
    assert adam_scales_of([torch.optim.AdamW(matrix(), lr=0.1)]).reference_rates == 0.1
    sgd = torch.optim.SGD(matrix(), 1.0)
    # SGD is the first optimizer, but the rate of AdamW decides.
    assert adam_scales_of([sgd, torch.optim.AdamW(matrix(), lr=0.1)]).rate == 0.1


@pytest.mark.parametrize("rate", [0.0, [], [0.1, -1.0], [0.1, float("inf")]])
def test_rates_that_are_not_positive_are_refused(rate):
    with refuses("AdamScalingCallback.rate", rate):
        AdamScalingCallback(2, rate)


def test_a_wrong_number_of_rates_is_refused():
    with refuses("AdamScalingCallback.rate", [0.1]):
        fit(
            TwoOptimizers(automatic=False),
            loader(batch_size=8),
            callbacks=[AdamScalingCallback(2, [0.1])],
            max_steps=1,
        )


def test_groups_with_equal_settings_are_measured_once():
    calls = []

    class Counted(OwnAdamW):
        def update_(self, p, gradient, group, state):
            calls.append(group["betas"])
            super().update_(p, gradient, group, state)

    optimizer = Counted([{"params": matrix()}, {"params": matrix(), "lr": 0.5}])
    rules = [group_rule(optimizer, group) for group in optimizer.param_groups]
    count = len(calls)
    assert count > 0 and rules[0] == rules[1]
    assert group_rule(Counted(matrix(), lr=0.2), optimizer.param_groups[0]) == rules[0]
    assert len(calls) == count
    other = Counted(matrix(), betas=(0.5, 0.9))
    group_rule(other, other.param_groups[0])
    assert len(calls) == 2 * count


def test_the_second_moment_of_rmsprop_is_alpha():
    scales = adam_scales_of([torch.optim.RMSprop(matrix(), alpha=0.99)])
    assert scales == AdamScales(0.99, 0.0, 0.01)
