"""SNAP and SNAP-it (Verdenius et al. 2020): they prune nodes (channels or hidden units)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx, nn

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.pruning.iterative import halving
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Batches, Network
from lit_dps.pruning.pruner import Pruner, check_count, refuse_nan
from lit_dps.pruning.reference_loss import TRAINING_LOSS, check_loss, losses_of

_LAYERS = (nn.Conv2d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# Modules between two layers that map zero to zero, node by node.
_BETWEEN = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
    nn.Identity,
)
_CALLS = {
    "relu",
    "gelu",
    "silu",
    "tanh",
    "leaky_relu",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "dropout",
    "flatten",
    "mean",
    "contiguous",
    "boolean_dispatch",  # the name of torch's pooling in fx
}


@dataclass(frozen=True)
class Hidden:
    """A layer whose nodes can be pruned.

    Attributes:
        name: Name of the layer.
        norms: Names of the batch normalizations between it and the next layers.
        after: Names of the next layers.
    """

    name: str
    norms: tuple[str, ...]
    after: tuple[str, ...]


class Snap(Pruner):
    """Scores |dL/dc_j|, where c_j = 1 multiplies the output of node j, bias included.

    The gradients are summed over the batches before the absolute value is taken, in evaluation
    mode. The nodes of the output layer are not pruned, and every layer keeps its best node.
    `pruning.sparsity` is the share of hidden *nodes*; the table shows how many weights are kept.

    The authors cut pruned nodes out of the network. Here the mask contains the node's row, its
    bias, its batch normalization, and its column in the next layer, so that the output is the same.

    Args:
        batches: Batches of each round, of `pruning.batch_size` examples.
        loss: "module" for the training loss, or "nll_on_logits" for the loss of the authors' code.
    """

    hits_count = False
    counts = "nodes"
    name = "snap"  # in messages

    def __init__(self, batches: int = 5, loss: str = TRAINING_LOSS):
        check_count("batches", batches)
        check_loss(loss)
        self.batches = batches
        self.loss = loss

    def schedule(self, sparsity: float) -> list[float]:
        """Return the share of pruned nodes after each round."""
        return [sparsity]

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        layers = hidden_layers(network.module, self.name)
        next_batches = network.stream()
        modules = dict(network.module.named_modules())
        kept = {}
        total = 0
        for layer in layers:
            nodes = len(_weight(modules[layer.name]))
            kept[layer.name] = torch.ones(nodes, dtype=torch.bool)
            total += nodes
        mask = None
        with network.evaluating():
            for round_sparsity in self.schedule(sparsity):
                with network.under(mask):
                    batches = next_batches(self.batches)
                    scores = node_scores(network, list(kept), batches, self.loss)
                for name, score in scores.items():
                    scores[name] = score.masked_fill(~kept[name], -1)
                kept = best_nodes(scores, total, round_sparsity)
                mask = mask_of(network.module, layers, kept)
        assert mask is not None
        return mask


class SnapIt(Snap):
    """SNAP in rounds: half of the nodes first, then half of the remaining way in each round.

    Args:
        rounds: Rounds before the last one, which reaches the sparsity.
        batches: Batches of each round.
        loss: See `Snap`.
    """

    name = "snap_it"

    def __init__(self, rounds: int = 6, batches: int = 5, loss: str = TRAINING_LOSS):
        super().__init__(batches, loss)
        check_count("rounds", rounds)
        self.rounds = rounds

    def schedule(self, sparsity: float) -> list[float]:
        return halving(sparsity, self.rounds)


def hidden_layers(module: nn.Module, method: str = "snap") -> list[Hidden]:
    """Return the layers of a network whose nodes can be pruned, in the order of the forward pass.

    Raises:
        ConfigError: If the network cannot be traced, or the nodes of a layer also go elsewhere, as
            with a residual connection.
    """
    network = getattr(module, "network", None)
    prefix = "network."
    if not isinstance(network, nn.Module):
        network = module
        prefix = ""
    try:
        graph = fx.symbolic_trace(network).graph
    except Exception as error:  # a forward pass may raise any error for a proxy
        why = f"it cannot be traced: {str(error).splitlines()[0]}"
        raise _cannot(method, network, why) from error
    modules = dict(network.named_modules())
    layers: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules[node.target], _LAYERS):
            if node.target in layers:
                raise _cannot(method, network, "it uses a layer twice")
            layers[node.target] = node
    hidden = []
    for name, node in layers.items():
        norms, after = _follow(node, modules, network, method)
        if after:
            norm_names = tuple(prefix + norm for norm in norms)
            after_names = tuple(prefix + layer for layer in after)
            hidden.append(Hidden(prefix + name, norm_names, after_names))
    if not hidden:
        raise _cannot(method, network, "it has no hidden layer")
    return hidden


def _follow(
    node: fx.Node, modules: dict[str, nn.Module], network: nn.Module, method: str
) -> tuple[list[str], list[str]]:
    """Return the batch normalizations and the layers that read the nodes of a layer.

    Both are empty if the nodes are the output of the network.
    """
    norms: list[str] = []
    after: list[str] = []
    strange = None
    users = list(node.users)
    for user in users:  # the list grows meanwhile
        name = str(getattr(user.target, "__name__", user.target))
        module = None
        if user.op == "call_module":
            module = modules.get(name)
        if isinstance(module, _LAYERS):
            if isinstance(module, nn.Conv2d) and module.groups > 1:
                raise _cannot(method, network, f"{name} has groups")
            after.append(name)
            continue
        if isinstance(module, _NORMS):
            norms.append(name)
        elif user.op == "output" or not _maps_zero_to_zero(module, name):
            strange = strange or name
        users.extend(user.users)
    if after and strange:
        raise _cannot(method, network, f"the nodes of {node.target} go through {strange}")
    return norms, after


def _maps_zero_to_zero(module: nn.Module | None, name: str) -> bool:
    """Return True if a module, or a function by its name, keeps nodes and maps zero to zero."""
    if module is None:
        return name in _CALLS
    return isinstance(module, _BETWEEN)


def _cannot(method: str, network: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        "pruning.method", method, f"an unstructured method for {type(network).__name__}: {why}"
    )


@contextmanager
def _gated(modules: dict[str, nn.Module], gates: dict[str, Tensor]) -> Iterator[None]:
    """Multiply the outputs of layers by their gates while the context is active."""
    with ExitStack() as stack:
        for name, gate in gates.items():
            hook = partial(_multiply_output, gate)
            stack.enter_context(modules[name].register_forward_hook(hook))
        yield


def _multiply_output(gate: Tensor, layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        gate = gate.view(-1, 1, 1)
    return output * gate


def node_scores(
    network: Network, names: list[str], batches: Batches, loss: str = TRAINING_LOSS
) -> dict[str, Tensor]:
    """Return |sum of dL/dc| of the nodes of some layers, over the batches of all ranks.

    Args:
        network: The network.
        names: Names of the layers.
        batches: The batches.
        loss: Name of L; see `losses_of`.
    """
    modules = dict(network.module.named_modules())
    gates = {}
    sums = []
    for name in names:
        weight = _weight(modules[name])
        gates[name] = torch.ones(
            len(weight), device=weight.device, dtype=weight.dtype, requires_grad=True
        )
        sums.append(torch.zeros(len(weight), dtype=torch.float64))
    with _gated(modules, gates):
        for value, weight in losses_of(network, batches, loss):
            gradients = torch.autograd.grad(value, list(gates.values()))
            for total, gradient in zip(sums, gradients, strict=True):
                total += weight * gradient.cpu()
    scores = {}
    for name, total in zip(names, sums, strict=True):
        scores[name] = ranks.all_reduce_sum(total).abs()
    return scores


def best_nodes(scores: dict[str, Tensor], total: int, sparsity: float) -> dict[str, Tensor]:
    """Return which nodes are kept: the best round(total (1 - sparsity)) and the best of a layer.

    Args:
        scores: Scores of the nodes of each layer.
        total: Number of all nodes.
        sparsity: Share of the nodes to prune.
    """
    refuse_nan(scores)
    flat = torch.cat(list(scores.values()))
    order = torch.sort(flat, descending=True, stable=True).indices
    kept = torch.zeros(len(flat), dtype=torch.bool)
    start = 0
    for score in scores.values():
        kept[start + int(score.argmax())] = True
        start += len(score)
    missing = max(round(total * (1 - sparsity)) - int(kept.sum()), 0)
    kept[order[~kept[order]][:missing]] = True
    sizes = [len(score) for score in scores.values()]
    return dict(zip(scores, kept.split(sizes), strict=True))


def mask_of(module: nn.Module, layers: list[Hidden], kept: dict[str, Tensor]) -> Mask:
    """Return the mask of a network without some nodes.

    It covers the layers and the batch normalizations of pruned nodes.

    Args:
        module: The network.
        layers: The layers whose nodes can be pruned.
        kept: Which nodes of each layer are kept.
    """
    modules = dict(module.named_modules())
    names: set[str] = set()
    for layer in layers:
        names |= {layer.name, *layer.after}
    tensors = {}
    for name in modules:
        if name in names:
            tensors[f"{name}.weight"] = torch.ones_like(_weight(modules[name]), dtype=torch.bool)
    for layer in layers:
        rows = tensors[f"{layer.name}.weight"]
        keep = kept[layer.name].to(rows.device)
        rows[~keep] = False
        for name in (layer.name, *layer.norms):
            if modules[name].bias is not None:
                tensors[f"{name}.bias"] = keep
            if name in layer.norms and modules[name].weight is not None:
                tensors[f"{name}.weight"] = keep
        for name in layer.after:
            # A flattened channel has a block of columns.
            columns = tensors[f"{name}.weight"]
            columns[:, ~keep.repeat_interleave(columns.shape[1] // len(keep))] = False
    return Mask(tensors)


def _weight(layer: nn.Module) -> Tensor:
    """Return the weight of a convolution or a linear layer, with a row for each node."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
