"""SNAP and SNAP-it (Verdenius et al. 2020): whole nodes are pruned, channels and hidden units; here
as masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.pruning.iterative import halving
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Batches, Network
from lit_dps.pruning.pruner import Pruner
from lit_dps.pruning.reference_loss import OWN, check_loss, losses_of

_LAYERS = (nn.Conv2d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# What stands between a layer and the next one and gives zero for zero, node by node
_BETWEEN = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)
_BETWEEN += (nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Identity)
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
}
_CALLS |= {"flatten", "mean", "contiguous", "boolean_dispatch"}  # what fx calls torch's pooling


@dataclass(frozen=True)
class Hidden:
    """A layer whose nodes can be pruned.

    Attributes:
        name: Of the layer.
        norms: Of the batch normalizations between it and the next one.
        after: Of the next layers.
    """

    name: str
    norms: tuple[str, ...]
    after: tuple[str, ...]


class Snap(Pruner):
    """|dL/dc_j|, where c_j = 1 multiplies the output of node j, bias included, of a hidden layer.

    Summed over the batches before the absolute value is taken. The nodes of the output layer are
    not pruned, and every layer keeps its best one. `pruning.sparsity` is the share of hidden
    *nodes*; the table says how many weights are left. As a mask: the node's row, its bias, its
    batch normalization, and its column in the next layer, so the output is that of the network that
    is cut; the authors cut it. In evaluation mode.

    Args:
        batches: Of each round, as `pruning.batch_size` has them.
        loss: "module", the training loss, or "nll_on_logits", that of the authors' code.
    """

    hits_count = False
    counts = "nodes"
    name = "snap"  # in messages

    def __init__(self, batches: int = 5, loss: str = OWN):
        if batches < 1:
            raise ConfigError("pruning.options.batches", batches, "at least 1")
        check_loss(loss)
        self.batches, self.loss = batches, loss

    def schedule(self, sparsity: float) -> list[float]:
        """The share of pruned nodes after each round."""
        return [sparsity]

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        layers, take = hidden_layers(network.module, self.name), network.stream()
        modules = dict(network.module.named_modules())
        kept = {
            layer.name: torch.ones(len(modules[layer.name].weight), dtype=torch.bool)
            for layer in layers
        }
        total, mask = sum(map(len, kept.values())), None
        with network.evaluating():
            for reached in self.schedule(sparsity):
                with network.under(mask):
                    scores = node_scores(network, list(kept), take(self.batches), self.loss)
                kept = best_nodes(
                    {n: s.masked_fill(~kept[n], -1) for n, s in scores.items()}, total, reached
                )
                mask = mask_of(network.module, layers, kept)
        return mask


class SnapIt(Snap):
    """SNAP in rounds, the schedule of SNIP-it: half of the nodes first, then half of the way that
    is left in each.

    Args:
        rounds: Before the last one, which goes all the way.
        batches: Of each round.
        loss: As of SNAP.
    """

    name = "snap_it"

    def __init__(self, rounds: int = 6, batches: int = 5, loss: str = OWN):
        super().__init__(batches, loss)
        if rounds < 1:
            raise ConfigError("pruning.options.rounds", rounds, "at least 1")
        self.rounds = rounds

    def schedule(self, sparsity: float) -> list[float]:
        return halving(sparsity, self.rounds)


def hidden_layers(module: nn.Module, method: str = "snap") -> list[Hidden]:
    """The layers of a network whose nodes can be cut, in the order of the forward pass.

    Raises:
        ConfigError: for a network in which a layer's nodes also go elsewhere, as with a residual
            connection, or one that cannot be traced.
    """
    inner = getattr(module, "network", None)
    prefix, network = ("network.", inner) if isinstance(inner, nn.Module) else ("", module)
    try:
        graph = fx.symbolic_trace(network).graph
    except Exception as error:  # whatever its forward pass raises on a proxy
        raise _cannot(
            method, network, f"it cannot be traced: {str(error).splitlines()[0]}"
        ) from error
    modules = dict(network.named_modules())
    layers = [
        n for n in graph.nodes if n.op == "call_module" and isinstance(modules[n.target], _LAYERS)
    ]
    if len({n.target for n in layers}) < len(layers):
        raise _cannot(method, network, "it uses a layer twice")
    found = []
    for node in layers:
        norms, after = _follow(node, modules, network, method)
        if after:
            found.append(
                Hidden(
                    prefix + node.target,
                    *(tuple(prefix + name for name in x) for x in (norms, after)),
                )
            )
    if not found:
        raise _cannot(method, network, "it has no hidden layer")
    return found


def _follow(
    node: fx.Node, modules: dict[str, nn.Module], network: nn.Module, method: str
) -> tuple[list[str], list[str]]:
    """Batch normalizations and layers that a layer's nodes come to; none where they are the
    output."""
    norms, after, strange, ahead = [], [], None, list(node.users)
    for user in ahead:
        module = modules.get(user.target) if user.op == "call_module" else None
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if isinstance(module, _LAYERS):
            if isinstance(module, nn.Conv2d) and module.groups > 1:
                raise _cannot(method, network, f"{name} has groups")
            after.append(user.target)
            continue
        if isinstance(module, _NORMS):
            norms.append(user.target)
        elif user.op == "output" or not (
            isinstance(module, _BETWEEN) or (module is None and name in _CALLS)
        ):
            strange = strange or name
        ahead.extend(user.users)
    if after and strange:  # where nothing comes after, they are the output
        raise _cannot(method, network, f"the nodes of {node.target} go through {strange}")
    return norms, after


def _cannot(method: str, network: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        "pruning.method", method, f"an unstructured method for {type(network).__name__}: {why}"
    )


@contextmanager
def _gated(modules: dict[str, nn.Module], gates: dict[str, Tensor]) -> Iterator[None]:
    def gate(name: str):
        def multiply(layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            return output * (
                gates[name].view(-1, 1, 1) if isinstance(layer, nn.Conv2d) else gates[name]
            )

        return multiply

    handles = [modules[name].register_forward_hook(gate(name)) for name in gates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def node_scores(
    network: Network, names: list[str], batches: Batches, loss: str = OWN
) -> dict[str, Tensor]:
    """|sum over batches of all ranks of dL/dc| of the nodes of some layers, L being `losses_of`
    that name."""
    modules = dict(network.module.named_modules())
    like = {name: modules[name].weight for name in names}
    gates = {
        name: torch.ones(len(w), device=w.device, dtype=w.dtype, requires_grad=True)
        for name, w in like.items()
    }
    sums = [torch.zeros(len(gate), dtype=torch.float64) for gate in gates.values()]
    with _gated(modules, gates):
        for value, weight in losses_of(network, batches, loss):
            for total, gradient in zip(
                sums, torch.autograd.grad(value, list(gates.values())), strict=True
            ):
                total += weight * gradient.cpu()
    return {
        name: ranks.all_reduce_sum(total).abs() for name, total in zip(names, sums, strict=True)
    }


def best_nodes(scores: dict[str, Tensor], total: int, sparsity: float) -> dict[str, Tensor]:
    """Which nodes are kept: the best round(total (1 - sparsity)), and the best one of each
    layer."""
    flat = torch.cat(list(scores.values()))
    order = torch.sort(flat, descending=True, stable=True).indices
    kept = torch.zeros(len(flat), dtype=torch.bool)
    start = 0
    for score in scores.values():
        kept[start + int(score.argmax())] = True
        start += len(score)
    for i in order.tolist():
        if int(kept.sum()) >= round(total * (1 - sparsity)):
            break
        kept[i] = True
    return dict(zip(scores, kept.split([len(s) for s in scores.values()]), strict=True))


def mask_of(module: nn.Module, layers: list[Hidden], kept: dict[str, Tensor]) -> Mask:
    """The mask of a network without some nodes: of all its layers, and of the batch normalizations
    of pruned nodes."""
    modules = dict(module.named_modules())
    names = {name for layer in layers for name in (layer.name, *layer.after)}
    tensors = {}
    for name in [name for name in modules if name in names]:
        weight = modules[name].weight
        tensors[f"{name}.weight"] = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    for layer in layers:
        keep = kept[layer.name].to(modules[layer.name].weight.device)
        tensors[f"{layer.name}.weight"][~keep] = False
        for name in (layer.name, *layer.norms):
            if modules[name].bias is not None:
                tensors[f"{name}.bias"] = keep
            if name in layer.norms and modules[name].weight is not None:
                tensors[f"{name}.weight"] = keep
        for name in layer.after:  # a flattened channel has a block of columns
            columns = tensors[f"{name}.weight"]
            columns[:, ~keep.repeat_interleave(columns.shape[1] // len(keep))] = False
    return Mask(tensors)
