"""check_pruner: the conformance test of a pruning method."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_dps.pruning import Mask, Network, Pruner, prunable, pruner_of
from lit_dps.pruning.mask import multiply
from lit_dps.pruning.pruner import MaskUpdate
from lit_dps.testing.failure import ConformanceError, require
from lit_dps.testing.toy import BATCH_SIZE, CLASSES, toy_network
from lit_dps.training.hidden_state import capture_rng_state, equal_states, preserve_rng_state

SPARSITIES = (0.5, 0.9)
EXAMPLES = 24
SEED = 7


def check_pruner(
    pruner: Pruner | str,
    options: Mapping[str, Any] | None = None,
    sparsities: Sequence[float] = SPARSITIES,
    quick: bool = False,
) -> None:
    """Raise ConformanceError if a pruning method does not do what lit_dps requires.

    The network has a convolution and two linear layers, in double precision, and 24 examples.

    - The mask is one of prunable parameters. With `hits_count` it is a mask of all of them, and
      keeps exactly round(m (1 - S)).
    - It depends on the generator and not on global random numbers, which do not change either.
      The same call gives the same mask again.
    - The module remains in training mode, with the same parameters trained.
    - With `every`, `next_mask` keeps the count, depends on its update alone, and does not change
      the weights and gradients that it receives. A new pruner, as in a resumed run, gives the same
      mask.
    - Not in the quick part: With `batch_invariant` the mask does not depend on the batch size or
      on the order of the examples.

    Args:
        pruner: The method, or its name or class path.
        options: Arguments of its constructor, if it is named.
        sparsities: The sparsities S to try.
        quick: Whether to run the quick part only, at the highest sparsity.
    """
    if isinstance(pruner, str):
        pruner = pruner_of(pruner, options)
    if quick:
        sparsities = sparsities[-1:]
    fresh = copy.deepcopy(pruner)
    with preserve_rng_state(seed=0):
        for sparsity in sparsities:
            mask = _check_mask(pruner, sparsity)
            if pruner.every is not None:
                _check_next_mask(pruner, copy.deepcopy(fresh), sparsity, mask)
            if not quick:
                _check_batches(pruner, sparsity, mask)


class _Examples:
    """Examples in batches.

    Args:
        batch_size: Examples in a batch.
        order: Their order.
    """

    def __init__(self, batch_size: int = BATCH_SIZE, order: Tensor | None = None):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(EXAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
        if order is None:
            order = torch.arange(EXAMPLES)
        self.batch_size = batch_size
        self.parts = list(zip(x[order].split(batch_size), y[order].split(batch_size), strict=True))

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for x, y in self.parts:
            yield (x, y), len(y)


def _network(examples: _Examples) -> Network:
    """Return a network of 843 prunable elements with its initial weights."""
    with preserve_rng_state(seed=2):
        module = toy_network(4, 20).double()
    return Network(
        module,
        prunable(module),
        examples.batch_size,
        lambda: len(examples.parts),
        lambda: iter(examples),
        lambda batch, i: F.cross_entropy(module(batch[0]), batch[1]),
    )


def _mask(pruner: Pruner, network: Network, sparsity: float) -> Mask:
    return pruner.mask(network, sparsity, torch.Generator().manual_seed(SEED))


def _check_mask(pruner: Pruner, sparsity: float) -> Mask:
    name = type(pruner).__name__
    shown_by = f"sparsity {sparsity:g}, {EXAMPLES} examples in batches of {BATCH_SIZE}"
    examples = _Examples()
    network = _network(examples)
    torch.manual_seed(3)
    before = capture_rng_state()
    mask = _mask(pruner, network, sparsity)
    require(
        "global_random",
        equal_states(before, capture_rng_state()),
        f"{name} draws global random numbers",
        "random numbers of the generator that mask receives",
        shown_by,
    )
    _check_shapes(name, mask, network, shown_by)
    _check_count(pruner, mask, sparsity, network, shown_by)
    is_training = all(each.training for each in network.module.modules())
    is_trained = all(each.requires_grad for each in network.module.parameters())
    require(
        "mode",
        is_training and is_trained,
        f"{name} leaves the module in evaluation mode or freezes parameters",
        "training mode and trained parameters, as before",
        shown_by,
    )
    torch.manual_seed(4)
    again = _mask(pruner, _network(_Examples()), sparsity)
    require(
        "repeated",
        _equal(mask, again),
        f"{name} gives another mask when it is called again",
        "the same mask from the same weights, examples and generator",
        shown_by,
    )
    return mask


def _check_shapes(name: str, mask: Mask, network: Network, shown_by: str) -> None:
    parameters = dict(network.module.named_parameters())
    for key, tensor in mask.items():
        shape = parameters[key].shape if key in parameters else None
        require(
            "parameters",
            tensor.shape == shape,
            f"the mask of {name} has {key!r} of shape {tuple(tensor.shape)}",
            f"the prunable parameters {', '.join(network.parameters)} with their shapes",
            shown_by,
        )


def _check_count(
    pruner: Pruner, mask: Mask, sparsity: float, network: Network, shown_by: str
) -> None:
    kept, total = mask.count()
    name = type(pruner).__name__
    require("empty", kept > 0, f"{name} keeps nothing", "a mask that keeps something", shown_by)
    if not pruner.hits_count:
        return
    missing = [key for key in network.parameters if key not in mask]
    require(
        "covers",
        not missing,
        f"the mask of {name} leaves out {', '.join(missing)}",
        "a mask of all prunable parameters, of which a sparsity is a share, or hits_count = False",
        shown_by,
    )
    expected = round(total * (1 - sparsity))
    require(
        "count",
        kept == expected,
        f"{name} keeps {kept} of {total} elements",
        f"{expected}, which is round({total} x {1 - sparsity:g}), or hits_count = False",
        shown_by,
    )


def _check_batches(pruner: Pruner, sparsity: float, mask: Mask) -> None:
    """Check that the mask depends on batches only as the method says."""
    if not pruner.batch_invariant:
        return
    flipped = torch.arange(EXAMPLES).flip(0)
    for batch_size, order in ((EXAMPLES, None), (BATCH_SIZE, flipped)):
        other = _mask(pruner, _network(_Examples(batch_size, order)), sparsity)
        text = "in reverse order" if order is not None else f"in one batch of {batch_size}"
        require(
            "batches",
            _equal(mask, other),
            f"{type(pruner).__name__} is batch_invariant, and gives another mask",
            "the same mask for every division and order of the examples",
            f"sparsity {sparsity:g}, {EXAMPLES} examples {text}",
        )


def _check_next_mask(pruner: Pruner, fresh: Pruner, sparsity: float, mask: Mask) -> None:
    """Check a change of the mask during training.

    Args:
        pruner: The method, which has made the mask.
        fresh: The method as a resumed run builds it: its `mask` was not called.
        sparsity: The sparsity of the mask.
        mask: The mask before the change.
    """
    name = type(pruner).__name__
    shown_by = f"sparsity {sparsity:g}, step {pruner.every}"
    torch.manual_seed(3)
    changed = _next_mask(pruner, sparsity, mask)
    _check_shapes(name, changed, _network(_Examples()), shown_by)
    torch.manual_seed(4)
    require(
        "next_mask",
        _equal(changed, _next_mask(pruner, sparsity, mask)),
        f"next_mask of {name} gives another mask when it is called again",
        "the same mask from the same update and generator",
        shown_by,
    )
    _check_resumed(name, fresh, sparsity, mask, changed)
    if pruner.hits_count:
        kept, before = changed.count().kept, mask.count().kept
        require(
            "next_count",
            kept == before,
            f"next_mask of {name} keeps {kept} elements",
            f"{before} as before, or hits_count = False",
            shown_by,
        )


def _check_resumed(name: str, fresh: Pruner, sparsity: float, mask: Mask, changed: Mask) -> None:
    """Check that a new pruner, as in a resumed run, changes a mask in the same way."""
    try:
        again = _next_mask(fresh, sparsity, mask)
        difference = "gives another mask"
    except ConformanceError:
        raise
    except Exception as error:
        again = Mask({})
        difference = f"raises {type(error).__name__}: {error}"
    require(
        "next_resumed",
        _equal(changed, again),
        f"next_mask of {name} {difference} in a resumed run, whose pruner is new",
        "a mask from the update alone, such as from update.sparsity, without state of the pruner",
        f"sparsity {sparsity:g}, step {fresh.every}, a pruner whose mask was not called",
    )


def _next_mask(pruner: Pruner, sparsity: float, mask: Mask) -> Mask:
    """Return the mask after the first change, whose update a method must only read."""
    network = _network(_Examples())
    gradients = network.gradients()
    weights = {}
    for name in mask:
        weights[name] = network.parameters[name].detach().clone()
    multiply([(weights[name], mask[name]) for name in mask])
    every = pruner.every or 1
    update = MaskUpdate(
        step=every,
        max_steps=10 * every,
        sparsity=sparsity,
        mask=mask,
        weights={name: tensor.clone() for name, tensor in weights.items()},
        gradients={name: gradients[name].clone() for name in mask},
        generator=torch.Generator().manual_seed(SEED),
    )
    changed = pruner.next_mask(update)
    _check_only_read(type(pruner).__name__, update, weights, gradients)
    return changed


def _check_only_read(
    name: str, update: MaskUpdate, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    for key in update.mask:
        is_read = torch.equal(update.weights[key], weights[key]) and torch.equal(
            update.gradients[key].to(gradients[key]), gradients[key]
        )
        require(
            "only_read",
            is_read,
            f"next_mask of {name} changes the weights or gradients of {key}",
            "tensors of the run are only read",
            f"step {update.step}",
        )


def _equal(one: Mask, other: Mask) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
