"""How the settings of an optimizer's parameter groups follow the batch size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lit_dps.core.optimizer_kind import OptimizerKind, kind_of_name
from lit_dps.optim.clipping import Clipping
from lit_dps.optim.parameter_groups import parameters_of
from lit_dps.optim.rule import RuleOptimizer
from lit_dps.training.optimizer_measurement import Beta, candidate_betas, measure

# The names of torch's decay rates of a second moment that are not among betas.
_SECOND_MOMENTS = {"rmsprop": Beta("alpha"), "adadelta": Beta("rho")}
# Classes of torch with a decoupled weight decay, in addition to those whose groups say so. With
# torch 2.6 groups of AdamW do not say so.
_DECOUPLED = ("adamw", "muon", "adafactor")
# An unknown optimizer that cannot be measured is taken to be like the first of these in its name.
_DECOUPLED_IF_UNMEASURED = ("adamw", "lion", "muon")


@dataclass(frozen=True)
class GroupRule:
    """How the settings of a parameter group follow the batch size.

    Attributes:
        kind: The kind of the update, which decides how the rate follows.
        second_moment: The decay rate of its second moment; None without one.
        scales_decay: Whether the weight decay is decoupled from the gradient. If it is a part of
            the gradient, it is a part of the loss, which does not depend on the batch size.
        is_listed: Whether the class is in `KIND_OF_NAME`.
        is_measured: Whether a copy of the optimizer was measured, because its class is not listed.
    """

    kind: OptimizerKind
    second_moment: Beta | None
    scales_decay: bool
    is_listed: bool
    is_measured: bool = False


def group_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> GroupRule:
    """Return how the settings of a group follow the batch size.

    The classes of torch.optim are known. Other optimizers are measured, and of those that are in
    `KIND_OF_NAME` the kind is known. One that cannot be measured is taken for Adam if it has a
    second beta, and for SGD otherwise.
    """
    name, is_of_torch = _listed(optimizer)
    kind = None if name is None else kind_of_name(name)
    if kind is OptimizerKind.SGD_LIKE:
        return GroupRule(kind, None, False, is_listed=True)
    if kind is not None and is_of_torch:
        decoupled = bool(group.get("decoupled_weight_decay")) or name in _DECOUPLED
        return GroupRule(kind, _second_moment_of_torch(name, kind, group), decoupled, True)
    measured = measure(optimizer, group)
    if measured is None:
        return _unmeasured_rule(optimizer, group, kind)
    second_moment = measured.second_moment
    if kind is OptimizerKind.SIGN:
        second_moment = None
    is_listed = kind is not None
    if kind is None:
        kind = OptimizerKind.SGD_LIKE if measured.grows else OptimizerKind.ADAPTIVE
    if kind is OptimizerKind.SGD_LIKE:
        return GroupRule(kind, None, False, is_listed, is_measured=True)
    scales_decay = bool(measured.decoupled_decay)
    return GroupRule(kind, second_moment, scales_decay, is_listed, is_measured=True)


def _second_moment_of_torch(
    name: str | None, kind: OptimizerKind, group: Mapping[str, Any]
) -> Beta | None:
    """Return the decay rate of the second moment of a class of torch.optim."""
    if name in _SECOND_MOMENTS:
        return _SECOND_MOMENTS[name]
    if kind is OptimizerKind.ADAPTIVE and "betas" in group:
        return Beta("betas", 1)
    return None


def _unmeasured_rule(
    optimizer: Optimizer, group: Mapping[str, Any], kind: OptimizerKind | None
) -> GroupRule:
    """Return the rule of an optimizer by its settings and the name of its class."""
    candidates = candidate_betas(group)
    is_listed = kind is not None
    if kind is None:
        kind = OptimizerKind.ADAPTIVE if candidates else OptimizerKind.SGD_LIKE
    second_moment = None
    if len(candidates) == 1 and kind not in (OptimizerKind.SIGN, OptimizerKind.SGD_LIKE):
        second_moment = candidates[0]
    name = type(optimizer).__name__.lower()
    is_decoupled = any(part in name for part in _DECOUPLED_IF_UNMEASURED)
    scales_decay = is_decoupled and kind is not OptimizerKind.SGD_LIKE
    return GroupRule(kind, second_moment, scales_decay, is_listed)


def _listed(optimizer: Optimizer) -> tuple[str | None, bool]:
    """Return the name in `KIND_OF_NAME` whose update an optimizer makes, and if torch has it.

    The name is None if the update is unknown. A subclass makes the update of a listed class if it
    does not replace `step`.
    """
    if isinstance(optimizer, RuleOptimizer):
        name = optimizer.rule.name.rpartition(".")[2].lower()
        return (name if kind_of_name(name) is not None else None), False
    for cls in type(optimizer).__mro__:
        if kind_of_name(cls.__name__) is None:
            continue
        # torch wraps `step` of a class when it makes the first instance.
        if inspect.unwrap(type(optimizer).step) is inspect.unwrap(cls.step):
            return cls.__name__.lower(), cls.__module__.partition(".")[0] == "torch"
        return None, False
    return None, False


def initial_rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """Return the rate of each group of each optimizer, before its schedule."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return [float(group.get("initial_lr", group["lr"])) for group in groups]


def optimizer_kinds(optimizers: Sequence[Optimizer]) -> list[OptimizerKind]:
    """Return the kind of each group of each optimizer."""
    kinds = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kinds.append(group_rule(optimizer, group).kind)
    return kinds


def is_adaptive(optimizers: Sequence[Optimizer]) -> bool:
    """Return True if the update of a group does not grow with the gradient.

    The learning rate of such a group grows as sqrt(B) (`lit_dps.core.optimizer_kind`).
    """
    return any(kind is not OptimizerKind.SGD_LIKE for kind in optimizer_kinds(optimizers))


def describe_unlisted(optimizer: Optimizer) -> list[str]:
    """Return notes on how an optimizer of an unknown class is treated, and why."""
    name = type(optimizer).__name__
    lines = []
    for group in optimizer.param_groups:
        rule = group_rule(optimizer, group)
        if rule.is_listed:
            continue
        model = "Adam" if rule.kind is not OptimizerKind.SGD_LIKE else "SGD"
        line = f"{name} could not be measured; by its arguments it is treated like {model}."
        if rule.is_measured and model == "Adam":
            line = (
                f"{name} was measured: its update does not grow with the gradient, so it is "
                "treated like Adam."
            )
            if rule.second_moment is None and candidate_betas(group):
                line += " None of its betas decays a second moment, so all of them stay."
            if not rule.scales_decay and group.get("weight_decay"):
                line += " Its weight decay is a part of the gradient, so it stays."
        elif rule.is_measured:
            line = (
                f"{name} was measured: its update grows with the gradient, so it is treated like "
                "SGD."
            )
        if line not in lines:
            lines.append(line)
    return lines


def mixed_rates_note(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return a note if the rates of groups follow the batch size by different rules."""
    names: dict[float, list[str]] = {}
    for optimizer in optimizers:
        for kind in optimizer_kinds([optimizer]):
            of_power = names.setdefault(kind.rate_power, [])
            if type(optimizer).__name__ not in of_power:
                of_power.append(type(optimizer).__name__)
    if len(names) < 2:
        return []
    plain = " and ".join(names[1.0])
    other = " and ".join(names[0.5])
    return [
        f"The rate of {plain} grows with B, the rate of {other} with sqrt(B). No rule for one "
        "learning rate fits both."
    ]


def clip_gradients(trainer: Trainer, optimizer: Optimizer) -> None:
    """Clip the gradients of an optimizer's parameters, like the trainer does for its own."""
    clipping = Clipping.of(
        {
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        }
    )
    if clipping is not None:
        clipping.clip(parameters_of(optimizer))
