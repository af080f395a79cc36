"""Starts: the initial weights of a pruned network. They test which weights a mask needs.

"original" keeps the initial weights. "reinit" draws new weights by the network's initialization
(Frankle et al. 2021, Section 5). "isometry" moves the weights under the mask (`restore_isometry`,
Lee et al. 2020). "scaled_by_density" divides the weights of each masked tensor by the root of its
density (`scale_by_density`, Dey et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import JACOBIAN, RESIDUAL
from lit_dps.core.trial_config import Init
from lit_dps.parallel import ranks
from lit_dps.pruning.isometry import STEPS, distances, jacobian_singular_values, restore_isometry
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network, same

# Builds the network again: "init" under the seed of its trial, "reinit" under another seed.
Redraw = Callable[[str], nn.Module]
CopyNetwork = Callable[[], AbstractContextManager[Network]]
EXAMPLES = 100  # that the Jacobian is computed at: the first ones of the pass
MAX_OUTPUTS = 100  # of a network whose Jacobian is computed


def initialize_pruned(
    init: Init,
    module: nn.Module,
    mask: Mask,
    network: CopyNetwork,
    redraw: Redraw | None = None,
    steps: int = STEPS,
) -> dict[str, float]:
    """Set the weights that a network is trained from under its mask; pruned weights become zero.

    Args:
        init: Which weights.
        module: The network, with its initial weights.
        mask: Its mask.
        network: Makes the copy that a pruning method works on.
        redraw: Builds the network again; None if that is not possible.
        steps: The most steps of the descent towards isometry.

    Returns:
        Measurements, as in `TrialResult.flags`.

    Raises:
        ConfigError: if the network cannot start so.
    """
    flags = {}
    if mask.weights is not None:
        if init != "original":
            raise ConfigError(
                "pruning.init", init, "original, because the file of masks has weights"
            )
        module.load_state_dict(mask.weights)
    if init == "reinit":
        _reinit(module, mask, redraw)
    elif init == "isometry":
        flags = _isometry(module, mask, network, steps)
    elif init == "scaled_by_density":
        scale_by_density(module, mask)
    mask.apply_to_weights(module)
    return flags


@torch.no_grad()
def scale_by_density(module: nn.Module, mask: Mask) -> None:
    """Divide the weights of each masked tensor by the root of its density, in place.

    This is the initialization of the sparse maximal update parametrization (SmuPar; Dey et al.
    2024, arXiv 2405.15743): the variance of a sum over the kept inputs is that of the dense layer
    if the mask is random. It is not the whole parametrization, which also divides Adam's rate of
    hidden layers by the density. A study that searches the rate in each cell finds a common factor
    of all layers itself. Tensors with fewer than two dimensions, such as biases, do not change, and
    neither do fully pruned tensors.

    Args:
        module: The network.
        mask: Its mask. If it changes during training, the density is that of the first mask.

    Raises:
        ConfigError: if no masked tensor can be scaled.
    """
    _refuse_immovable("scaled_by_density", module, mask)
    parameters = dict(module.named_parameters())
    for name, (kept, total) in mask.kept().items():
        if kept and mask[name].ndim >= 2:
            parameters[name].mul_((total / kept) ** 0.5)


def _reinit(module: nn.Module, mask: Mask, redraw: Redraw | None) -> None:
    """Replace parameters and buffers by what the network has under another seed."""
    if redraw is None:
        raise _reinit_error(module, "only a study can build it again")
    same_seed, other_seed = redraw("init"), redraw("reinit")
    parameters = dict(module.named_parameters())
    redrawn = dict(other_seed.named_parameters())
    rebuilt = dict(same_seed.named_parameters())
    for name, parameter in parameters.items():
        if name not in rebuilt or not same(rebuilt[name], parameter):
            reason = f"built again, it does not have the weights {name} that training began with"
            raise _reinit_error(module, reason)
    for name, parameter in parameters.items():
        if name not in redrawn or redrawn[name].shape != parameter.shape:
            raise _reinit_error(module, "built under another seed, it has other parameters")
    if all(same(redrawn[name], parameters[name]) for name in mask):
        raise _reinit_error(module, "its weights do not depend on a seed")
    buffers = dict(module.named_buffers())
    redrawn_buffers = dict(other_seed.named_buffers())
    drawn = []
    # Only buffers that the initialization sets are drawn again, such as those of a teacher.
    for name, buffer in same_seed.named_buffers():
        if name in buffers and name in redrawn_buffers and same(buffer, buffers[name]):
            drawn.append(name)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(redrawn[name])
        for name in drawn:
            buffers[name].copy_(redrawn_buffers[name])


def _reinit_error(module: nn.Module, reason: str) -> ConfigError:
    allowed = f"original or isometry for {type(module).__name__}: {reason}"
    return ConfigError("pruning.init", "reinit", allowed)


def _isometry(module: nn.Module, mask: Mask, network: CopyNetwork, steps: int) -> dict[str, float]:
    """Move the weights towards isometry; return distances and Jacobian before and after."""
    _refuse_immovable("isometry", module, mask)

    def move() -> tuple[dict[str, Tensor], dict[str, float]]:
        with network() as copy:
            mask.apply_to_weights(copy.module)
            parameters = dict(copy.module.named_parameters())
            x = _examples(copy)
            flags = {RESIDUAL.format("before"): sum(distances(parameters, mask).values())}
            flags |= _spectrum(copy, x, "before")
            moved = restore_isometry(parameters, mask, steps)
            flags[RESIDUAL.format("after")] = sum(moved.values())
            flags |= _spectrum(copy, x, "after")
            return {name: parameters[name].detach().cpu() for name in moved}, flags

    weights, flags = ranks.on_rank_zero(move)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, moved in weights.items():
            parameters[name].copy_(moved)
    return flags


def _refuse_immovable(init: Init, module: nn.Module, mask: Mask) -> None:
    """Raise ConfigError unless the masked weights can be moved or scaled."""
    reason = None
    if not any(keep.ndim >= 2 for keep in mask.values()):
        reason = "no pruned parameter has two or more dimensions"
    for name in mask:
        if "parametrizations." in name:
            reason = f"{name} is no weight, but a part of a parametrization"
            break
    if reason is not None:
        allowed = f"original or reinit for {type(module).__name__}: {reason}"
        raise ConfigError("pruning.init", init, allowed)


def _examples(network: Network) -> Tensor | None:
    """Return the first inputs of the pass; None if there are none, or if they are not real."""
    try:
        batch, _ = next(iter(network.batches()))
    except Exception:  # data without a finite pass, which methods without data do not need
        return None
    x: Any = batch
    if isinstance(batch, (tuple, list)) and batch:
        x = batch[0]
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1:
        return x[:EXAMPLES]
    return None


def _spectrum(network: Network, x: Tensor | None, when: str) -> dict[str, float]:
    """Return mean and deviation of the Jacobian's singular values, and the median condition.

    The mean is over all examples, in evaluation mode. Empty for a network that does not map an
    input to at most `MAX_OUTPUTS` numbers.
    """

    def forward(x: Tensor) -> Tensor:
        outputs = network.forward(x)
        is_vector = isinstance(outputs, Tensor) and outputs.ndim == 2
        if not is_vector or outputs.shape[1] > MAX_OUTPUTS:
            raise ValueError("no vector of few outputs for an example")
        return outputs

    if x is None:
        return {}
    try:
        with network.evaluating(), torch.enable_grad():
            values = jacobian_singular_values(forward, x)
    except Exception:  # `forward` of a user's network may raise anything for an input alone
        return {}
    largest = values[:, 0]
    # Rounding makes singular values of about this size from zero.
    floor = largest * torch.finfo(values.dtype).eps
    smallest = values[:, -1].where(values[:, -1] > floor, 0)
    condition = torch.where(smallest > 0, largest / smallest, torch.inf).median()
    spectrum = {
        "mean": values.mean(),
        "spread": values.std(correction=0),
        "condition": condition,
    }
    flags = {}
    for name, value in spectrum.items():
        flags[JACOBIAN.format(name, when)] = float(value)
    return flags
