"""SynFlow (Tanaka et al. 2020): synaptic flow, without data, in rounds, so that no layer is pruned
whole."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network
from lit_dps.pruning.pruner import Pruner, top_k


class SynFlow(Pruner):
    """|w| dR/d|w|, where R is the sum of the outputs for an input of ones, all weights replaced by
    their absolutes.

    In float64 and evaluation mode: in float32 the product over many layers underflows. After each
    round the share that is kept has fallen by the same factor (Tanaka et al. 2020, Algorithm 1).

    Networks of integers, a language model's characters say, are refused: a one is just one of the
    characters. Ones in place of what their embedding gives are no way out: a layer norm, which
    follows in a transformer, takes the mean off and makes zeros of them, so that nothing flows; and
    the embedding's own weights would have no score.

    Args:
        rounds: How many.
    """

    passes = 0

    def __init__(self, rounds: int = 100):
        if rounds < 1:
            raise ConfigError("pruning.options.rounds", rounds, "at least 1")
        self.rounds = rounds

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        mask = None
        for i in range(1, self.rounds + 1):
            scores = flow(network, mask)[1]
            if mask is not None:
                scores = {
                    name: score.masked_fill(~mask[name], -1) for name, score in scores.items()
                }
            mask = top_k(
                scores, 1 - (1 - sparsity) ** (i / self.rounds) if i < self.rounds else sparsity
            )
        return mask


def flow(network: Network, mask: Mask | None = None) -> tuple[float, dict[str, Tensor]]:
    """R, and the score of each element (float64), of a network under a mask; the network stays as
    it is.

    Raises:
        ConfigError: for a network whose inputs are no real numbers, as images are.
    """
    with network.under(mask):
        twin = copy.deepcopy(network.module).double().eval()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            if tensor.is_floating_point():
                tensor.abs_()
    named = dict(twin.named_parameters())
    parameters = {name: named[name] for name in network.parameters}
    ones = torch.ones(
        (1, *_input_shape(network)), dtype=torch.float64, device=next(twin.parameters()).device
    )
    total = twin(ones).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    found = zip(parameters.items(), gradients, strict=True)
    return float(total.detach()), {
        name: (g * p).detach() for (name, p), g in found if g is not None
    }


def _input_shape(network: Network) -> tuple[int, ...]:
    first = next(iter(network.batches()), None)
    x = (
        first[0][0]
        if first is not None and isinstance(first[0], (tuple, list))
        else first and first[0]
    )
    real = isinstance(x, Tensor) and x.is_floating_point()
    shape = ranks.broadcast(tuple(x.shape[1:]) if real else None)  # a rank may have no batch
    if shape is None:
        what = (
            "another method for inputs that are no real numbers: its input of ones would be "
            "one "
            "character or token"
        )
        raise ConfigError("pruning.method", "synflow", what)
    return shape
