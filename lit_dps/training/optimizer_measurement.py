"""Measures what an optimizer of an unknown class does, on a copy that updates a small matrix.

The copy has the settings of one group. It is stepped some times, and its last update is compared
with the last update under other gradients or other settings.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_dps.optim.parameter_groups import group_settings, parameters_of
from lit_dps.optim.rule import RuleOptimizer, at_gradient_point

# RAdam divides by the second moment only after some steps.
STEPS = 13
GRADIENT_FACTOR = 10.0
# Updates with a smaller relative difference count as equal.
SAME = 1e-3
# Values of a beta that are compared. They are far apart, so that the updates differ.
BETAS = (0.9, 0.5)
# Large beside the update of most rules, so that its effect is visible.
MEASURED_DECAY = 0.1
# These hold hooks of the user, which must not see the copy.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

_measurements: WeakKeyDictionary[type, dict[str, Measurement | None]] = WeakKeyDictionary()


class Beta(NamedTuple):
    """A decay rate among the settings of a parameter group.

    Attributes:
        name: The setting.
        place: Its place in the setting; None if the setting is a number.
    """

    name: str
    place: int | None = None

    def of(self, group: Mapping[str, Any]) -> float:
        """Return its value in a group."""
        value = group[self.name]
        if self.place is None:
            return float(value)
        return float(value[self.place])

    def changed(self, group: Mapping[str, Any], beta: float) -> Any:
        """Return the value of the setting with another beta."""
        if self.place is None:
            return beta
        betas = list(group[self.name])
        betas[self.place] = beta
        return type(group[self.name])(betas)


@dataclass(frozen=True)
class Measurement:
    """What the update of an optimizer does.

    Attributes:
        grows: Whether ten times the gradient gives at least sqrt(10) times the update.
        second_moment: The decay rate of the second moment; None if no beta is one, as in a
            sign-based rule.
        decoupled_decay: Whether weight decay acts on the weights beside the update, so that its
            effect does not depend on the gradient. None without weight decay.
    """

    grows: bool
    second_moment: Beta | None
    decoupled_decay: bool | None


def measure(optimizer: Optimizer, group: Mapping[str, Any]) -> Measurement | None:
    """Return what the update of an optimizer does; None if its copy fails or does not move.

    The optimizer, its parameters and the generators of torch do not change. Groups with equal
    settings are measured once.

    Args:
        optimizer: The optimizer.
        group: One of its parameter groups.
    """
    measurements = _measurements.setdefault(type(optimizer), {})
    key = _settings_text(optimizer, group)
    if key not in measurements:
        measurements[key] = _measure(optimizer, group)
    return measurements[key]


def _settings_text(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Return all settings that a measurement may depend on, as a text."""
    settings: dict[str, Any] = {}
    for name, value in group_settings(group).items():
        if name not in ("lr", "initial_lr", "weight_decay"):
            settings[name] = value
    settings["has weight_decay"] = bool(group.get("weight_decay"))
    if isinstance(optimizer, RuleOptimizer):
        # Two rules may have the same name.
        settings["rule"] = id(optimizer.rule.update_)
    for name, value in vars(optimizer).items():
        if isinstance(value, bool | int | float | str):
            settings[f"attribute {name}"] = value
    return repr(sorted(settings.items()))


def _measure(optimizer: Optimizer, group: Mapping[str, Any]) -> Measurement | None:
    """Return what `measure` does, without a look at earlier measurements."""
    gradient = _random((4, 4), 1)
    try:
        small = _last_update(optimizer, group, [gradient] * STEPS)
        large = _last_update(optimizer, group, [GRADIENT_FACTOR * gradient] * STEPS)
        second_moment = _second_moment(optimizer, group)
        decoupled = _has_decoupled_decay(optimizer, group)
    except Exception:  # such as of an optimizer that needs a closure
        return None
    size = float(small.norm())
    if not 0 < size < math.inf:
        return None
    grows = float(large.norm()) / size >= math.sqrt(GRADIENT_FACTOR)
    return Measurement(grows, second_moment, decoupled)


def candidate_betas(group: Mapping[str, Any]) -> list[Beta]:
    """Return the settings of a group that may be the decay rate of a second moment.

    By convention the first beta averages gradients.
    """
    betas = []
    if isinstance(group.get("betas"), tuple | list):
        for place in range(1, len(group["betas"])):
            betas.append(Beta("betas", place))
    if isinstance(group.get("beta2"), int | float):
        betas.append(Beta("beta2"))
    return betas


def _second_moment(optimizer: Optimizer, group: Mapping[str, Any]) -> Beta | None:
    """Return the decay rate of the second moment; None if there is none.

    If only the signs of the gradients change, a second moment does not, and its decay rate does not
    matter for the direction of the update. If their sizes change, it matters. The decay rate of an
    average of gradients matters in both cases. A vector is updated, because rules for matrices,
    such as SOAP, treat it like Adam.
    """
    sizes = _random((16,), 1).abs() + 0.1
    only_signs = []
    with_sizes = []
    for step in range(STEPS):
        signs = _random((16,), 2 + step).sign()
        only_signs.append(signs * sizes)
        with_sizes.append(signs * (_random((16,), 100 + step).abs() + 0.1))
    for beta in candidate_betas(group):
        if not _depends_on(optimizer, group, beta, with_sizes):
            continue
        if not _depends_on(optimizer, group, beta, only_signs):
            return beta
    return None


def _depends_on(
    optimizer: Optimizer, group: Mapping[str, Any], beta: Beta, gradients: Sequence[Tensor]
) -> bool:
    """Return True if the direction of the last update depends on a beta."""
    directions = []
    for value in BETAS:
        changes = {beta.name: beta.changed(group, value)}
        update = _last_update(optimizer, group, gradients, **changes)
        directions.append(update / update.norm())
    return float((directions[0] - directions[1]).norm()) > SAME


def _has_decoupled_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    """Return True if the effect of weight decay does not depend on the size of the gradient."""
    if not group.get("weight_decay"):
        return None
    # The first step of SOAP does not move the weights.
    for steps in (1, 2):
        effects = []
        for scale in (1.0, GRADIENT_FACTOR):
            gradients = [scale * _random((4, 4), 1)] * steps
            decayed = _last_update(optimizer, group, gradients, weight_decay=MEASURED_DECAY)
            effects.append(decayed - _last_update(optimizer, group, gradients))
        size = float(effects[0].norm())
        if size > 0:
            return float((effects[1] - effects[0]).norm()) < SAME * size
    return False


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return standard normal numbers in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _last_update(
    optimizer: Optimizer, group: Mapping[str, Any], gradients: Sequence[Tensor], **settings: Any
) -> Tensor:
    """Return the last of some updates of a parameter, in double precision.

    Args:
        optimizer: The optimizer, which is copied.
        group: The group whose settings the copy has.
        gradients: The gradient of each step.
        settings: Other settings of the copy. Its weight decay is 0 by default.
    """
    parameter = nn.Parameter(_random(tuple(gradients[0].shape), 0))
    before = parameter.detach()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = _twin(optimizer, group, parameter, settings)
        for gradient in gradients:
            before = parameter.detach().clone()
            with at_gradient_point(twin):
                parameter.grad = gradient.clone()
            # A schedule or a strategy may have wrapped the step of the instance. Call the class's.
            type(optimizer).step(twin)
    return parameter.detach() - before


def _twin(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: nn.Parameter,
    changes: Mapping[str, Any],
) -> Any:
    """Return a copy of an optimizer that updates another parameter and has no state.

    `copy.copy` would lose the attributes of the instance, because `Optimizer.__getstate__` omits
    them.
    """
    # An optimizer may hold its parameters elsewhere too. The copy must not update them.
    memo: dict[int, Any] = {}
    for trained in parameters_of(optimizer):
        memo[id(trained)] = nn.Parameter(torch.empty(0))
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups", "step", *_HOOKS):
            vars(twin)[name] = copy.deepcopy(value, memo)
    for name in _HOOKS:
        vars(twin)[name] = OrderedDict()
    settings = copy.deepcopy(group_settings(group), memo)
    if "weight_decay" in settings:
        settings["weight_decay"] = 0.0
    settings.update(changes)
    if not float(settings.get("lr", 1.0)):  # a warm-up may begin at 0
        settings["lr"] = 1e-3
    twin.param_groups = [{**settings, "params": [parameter]}]
    twin.state = defaultdict(dict)
    return twin
