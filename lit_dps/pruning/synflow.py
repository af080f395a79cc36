"""SynFlow (Tanaka et al. 2020): pruning by synaptic flow, in rounds and without data."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.pruning.iterative import exclude_pruned
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner, check_count, top_k


class SynFlow(Pruner):
    """Scores |w| dR/d|w|, where R is the sum of the outputs for an input of ones.

    All weights are replaced by their absolute values for R. It is computed in float64, because in
    float32 the product over many layers underflows, and in evaluation mode. The kept share falls by
    a constant factor in each round, so that no layer is pruned completely (Tanaka et al. 2020,
    Algorithm 1).

    Networks of integers, such as the characters of a language model, are refused, because a one is
    just one of the characters. Ones in place of their embedding would not help: the layer norm that
    follows in a transformer subtracts the mean and makes them zeros. The embedding's weights would
    have no score either.

    Args:
        rounds: Number of rounds.
    """

    passes = 0

    def __init__(self, rounds: int = 100):
        check_count("rounds", rounds)
        self.rounds = rounds

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        mask = None
        for i in range(1, self.rounds + 1):
            _, scores = flow(network, mask)
            round_sparsity = sparsity
            if i < self.rounds:
                round_sparsity = 1 - (1 - sparsity) ** (i / self.rounds)
            mask = top_k(exclude_pruned(scores, mask), round_sparsity)
        assert mask is not None
        return mask


def flow(network: Network, mask: Mask | None = None) -> tuple[float, dict[str, Tensor]]:
    """Return R and the score of each element (float64) of a network under a mask.

    The network is not changed.

    Raises:
        ConfigError: If the inputs of the network are not real numbers.
    """
    with network.under(mask):
        absolute = copy.deepcopy(network.module).double().eval()
    with torch.no_grad():
        for tensor in (*absolute.parameters(), *absolute.buffers()):
            if tensor.is_floating_point():
                tensor.abs_()
    named = dict(absolute.named_parameters())
    parameters = {name: named[name] for name in network.parameters}
    device = next(absolute.parameters()).device
    ones = torch.ones((1, *_input_shape(network)), dtype=torch.float64, device=device)
    total = absolute(ones).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    scores = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is not None:
            scores[name] = (gradient * parameter).detach()
    return float(total.detach()), scores


def _input_shape(network: Network) -> tuple[int, ...]:
    """Return the shape of an input without its batch dimension."""
    shape = None
    first = next(iter(network.batches()), None)
    if first is not None:
        batch, _ = first
        x = batch
        if isinstance(batch, (tuple, list)):
            x = batch[0]
        if isinstance(x, Tensor) and x.is_floating_point():
            shape = tuple(x.shape[1:])
    shape = ranks.broadcast(shape)  # a rank may have no batch
    if shape is None:
        allowed = (
            "another method, because the inputs are no real numbers. Synflow's input of "
            "ones would be one character or token"
        )
        raise ConfigError("pruning.method", "synflow", allowed)
    return shape
