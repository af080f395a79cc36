"""Start: the weights that a pruned network is trained from. Is it the mask that counts, or the
weights under it?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import JACOBIAN, RESIDUAL
from lit_dps.core.trial_config import Init
from lit_dps.parallel import ranks
from lit_dps.pruning.isometry import STEPS, distances, jacobian_singular_values, restore_isometry
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.network_copies import same

Redraw = Callable[
    [str], nn.Module
]  # the network as it was built ("init"), or under another seed ("reinit")
EXAMPLES = 100  # that the Jacobian is taken at, the first ones of the pass
OUTPUTS = 100  # of a network whose Jacobian is taken, at most


def start(
    init: Init,
    module: nn.Module,
    mask: Mask,
    network: Callable[[], AbstractContextManager[Network]],
    redraw: Redraw | None = None,
    steps: int = STEPS,
) -> dict[str, float]:
    """Gives a network the weights that it is trained from under its mask, in place; its pruned
    weights are zero then.

    "original" leaves the initial weights. "reinit" draws new ones by the network's own
    initialization (Frankle et al. 2021, Section 5). "isometry" moves them under the mask
    (`restore_isometry`, Lee et al. 2020).

    Args:
        init: Which.
        module: The network, at its initial weights.
        mask: Its mask.
        network: Makes the copy that a pruning method works on.
        redraw: Builds the network; None where nobody can.
        steps: Of the descent towards isometry, at most.

    Returns:
        What was found, as in `TrialResult.flags`.

    Raises:
        ConfigError: where the network cannot start so.
    """
    found = {}
    if init == "reinit":
        _reinit(module, mask, redraw)
    elif init == "isometry":
        found = _isometry(module, mask, network, steps)
    mask.apply_to_weights(module)
    return found


def _reinit(module: nn.Module, mask: Mask, redraw: Redraw | None) -> None:
    def refused(why: str) -> ConfigError:
        return ConfigError(
            "pruning.init", "reinit", f"original or isometry for {type(module).__name__}: {why}"
        )

    if redraw is None:
        raise refused("only a study can build it anew")
    modules = module, redraw("init"), redraw("reinit")
    ours, again, other = (dict(m.named_parameters()) for m in modules)
    for name, parameter in ours.items():
        if name not in again or not same(again[name], parameter):
            raise refused(f"built anew it has not the weights {name} that training began with")
    if not all(name in other and other[name].shape == p.shape for name, p in ours.items()):
        raise refused("built under another seed it has other parameters")
    if all(same(other[name], ours[name]) for name in mask):
        raise refused("its weights do not depend on a seed")
    buffers, made, drawn = (dict(m.named_buffers()) for m in modules)
    of_seed = [
        n for n, b in buffers.items() if n in made and n in drawn and same(made[n], b)
    ]  # a teacher's, say
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(other[name])
        for name in of_seed:
            buffers[name].copy_(drawn[name])


def _isometry(
    module: nn.Module,
    mask: Mask,
    network: Callable[[], AbstractContextManager[Network]],
    steps: int,
) -> dict[str, float]:
    why = (
        None
        if any(keep.ndim >= 2 for keep in mask.values())
        else "no pruned parameter has two or more dimensions"
    )
    if made := [name for name in mask if "parametrizations." in name]:
        why = f"{made[0]} is no weight, but what one is made from"
    if why:
        raise ConfigError(
            "pruning.init", "isometry", f"original or reinit for {type(module).__name__}: {why}"
        )

    def repaired() -> tuple[dict[str, Tensor], dict[str, float]]:
        with network() as copy:
            mask.apply_to_weights(copy.module)
            parameters, x = dict(copy.module.named_parameters()), _examples(copy)
            found = {RESIDUAL.format("before"): sum(distances(parameters, mask).values())}
            found |= _spectrum(copy, x, "before")
            moved = restore_isometry(parameters, mask, steps)
            found |= {RESIDUAL.format("after"): sum(moved.values())} | _spectrum(copy, x, "after")
            return {name: parameters[name].detach().cpu() for name in moved}, found

    weights, found = ranks.on_rank_zero(repaired)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, moved in weights.items():
            parameters[name].copy_(moved)
    return found


def _examples(network: Network) -> Tensor | None:
    """The first inputs of the pass; None where they are no real numbers, or there is no pass."""
    try:
        batch, _ = next(iter(network.batches()))
    except Exception:  # data without a finite pass, which methods without data do not need
        return None
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return x[:EXAMPLES] if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 else None


def _spectrum(network: Network, x: Tensor | None, when: str) -> dict[str, float]:
    """Mean and deviation of the singular values of the Jacobian over all examples; the median of
    their condition.

    In evaluation mode. Nothing for a network that is no map from an input to at most `OUTPUTS`
    numbers.
    """

    def forward(x: Tensor) -> Tensor:
        outputs = network.forward(x)
        if not (isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] <= OUTPUTS):
            raise ValueError("no vector of few outputs for an example")
        return outputs

    if x is None:
        return {}
    try:
        with network.evaluating(), torch.enable_grad():
            values = jacobian_singular_values(forward, x)
    except Exception:  # whatever somebody's forward() raises for an input alone
        return {}
    floor = values[:, 0] * torch.finfo(values.dtype).eps  # of which rounding makes no smaller ones
    smallest = values[:, -1].where(values[:, -1] > floor, 0)
    found = {"mean": values.mean(), "spread": values.std(correction=0)}
    found["condition"] = torch.where(smallest > 0, values[:, 0] / smallest, torch.inf).median()
    return {JACOBIAN.format(name, when): float(value) for name, value in found.items()}
