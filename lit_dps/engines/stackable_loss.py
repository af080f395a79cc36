"""Checks that a module computes in a stack what it computes alone: loss, gradient, buffers, errors.

The checks call the module on a batch of its data, plainly and under `torch.vmap`, and compare the
values. Dropout is off in these calls. A stack draws it for each network, by
`torch.vmap(randomness="different")`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from lit_dps.core.errors import first_line
from lit_dps.engines.functional import Call, Functional, WithoutDropout, tensors_of
from lit_dps.engines.module_hooks import NeedsLightning
from lit_dps.module import ImageClassifier, is_wrong
from lit_dps.training.deterministic import full_float32
from lit_dps.training.hidden_state import (
    capture_attributes,
    capture_rng_state,
    equal_states,
    preserve_rng_state,
)

TRIED_EXAMPLES = 64  # of the training split, for trying a loss
# Examples of a batch that is tried in halves. Without gradients, they fit in any memory that can
# train a stack.
MAX_DIVIDED_EXAMPLES = 4096
# Relative tolerance between a loss over a batch and over its halves, or with and without vmap.
TOLERANCE = 1e-4
# Largest relative change of the weights of a network with other weights.
MOVED = 0.1
# Of the norm of a gradient. Rounding moves some inputs to the other side of a ReLU or a maximum,
# which changed 0.0008 of the norm at 2 of 16 initial weights of Simple-CNN. A gradient that depends
# on the other networks of a stack differs by about its own size.
KINK_TOLERANCE = 0.01
ERROR_LENGTH = 200  # characters of an error message in a reason


def examples_of_classes(classes: Tensor) -> Tensor:
    """Return the numbers of `TRIED_EXAMPLES` examples, ordered by class.

    They are the first example of each class, rare classes first, and the first examples of the
    data. So a loss with class weights or an ignored class shows that it is no mean over examples.

    Args:
        classes: The class of each example, shape (examples,). Labels of another type or shape have
            the first examples.
    """
    first_numbers = torch.arange(min(len(classes), TRIED_EXAMPLES), device=classes.device)
    if classes.ndim != 1 or classes.is_floating_point():
        return first_numbers
    # On the CPU, because MPS may not have the minimum of int64 by index.
    labels, of_examples, counts = classes.cpu().unique(return_inverse=True, return_counts=True)
    numbers = torch.arange(len(classes))
    first_of_class = numbers.new_full((len(labels),), len(classes))
    first_of_class.scatter_reduce_(0, of_examples, numbers, "amin")
    first_of_class = first_of_class[counts.argsort(stable=True)]
    chosen = dict.fromkeys(
        [*first_of_class.tolist()[: TRIED_EXAMPLES // 2], *first_numbers.tolist()]
    )
    index = torch.tensor(list(chosen)[: len(first_numbers)], device=classes.device)
    return index[classes[index].argsort(stable=True)]


def reason_against_stacked_loss(
    module: ImageClassifier,
    batch: tuple[Tensor, Tensor],
    whole_batch: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Return why loss or errors of a module cannot be computed for a stack; None if they can.

    The module cannot be trained afterwards. It is left in evaluation mode.

    Args:
        module: The module.
        batch: Images and classes of a few examples.
        whole_batch: Those of as many examples as a batch of the trial has, at most
            `MAX_DIVIDED_EXAMPLES`. A loss of the 64 largest errors shows only there that it is no
            mean over examples.
    """
    name = type(module).__name__
    try:
        with full_float32():
            return (
                reason_against_training(module, "loss", batch)
                or _reason_against_halves(module, batch)
                or (whole_batch and _reason_against_halves(module, whole_batch))
                or _reason_against_errors(module, batch)
            )
    except NeedsLightning:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return vmap_reason(name, error)


def vmap_reason(name: str, error: Exception) -> str:
    """Return the reason that an error under `torch.vmap` gives against stacking a class."""
    text = first_line(error)
    if "data-dependent control flow" in text or ".item()" in text:
        return f"{name} needs the value of a tensor in Python, as in `if loss > 1:` or `.item()`"
    return f"{name} does not run under torch.vmap ({text[:ERROR_LENGTH]})"


def trains_on_whole_batches(module: LightningModule, keeps_untrained: bool) -> bool:
    """Return True if a stack must not divide the batches of a module.

    A module with buffers may take statistics of a batch, as batch normalization does. A loss may
    also move untrained parameters, such as prototypes: once for each part of a batch.

    Args:
        module: The module.
        keeps_untrained: Whether its loss keeps untrained parameters; see `keeps_untrained`.
    """
    if not isinstance(module, ImageClassifier) or any(True for _ in module.buffers()):
        return True
    return changes_in_steps(module) and not keeps_untrained


@torch.no_grad()
def keeps_untrained(module: LightningModule, batch: tuple[Tensor, Tensor]) -> bool:
    """Return True if the loss of a batch changes no untrained parameter, such as a frozen layer.

    The call has other weights, because a teacher that equals its student does not move.
    """
    untrained = [key for key, each in module.named_parameters() if not each.requires_grad]
    if not untrained:
        return True
    moved = moved_tensors(dict(module.named_parameters()))
    before = {key: moved[key].clone() for key in untrained}
    versions = {key: moved[key]._version for key in untrained}
    with preserve_rng_state(seed=0):
        buffers = dict(module.named_buffers())
        Functional(module).call_and_update("loss", moved, buffers, batch)
    for key in untrained:
        if moved[key]._version != versions[key] or not equal_with_nan(moved[key], before[key]):
            return False
    return True


def changes_in_steps(module: LightningModule) -> bool:
    """Return True if a loss may change a tensor of a module that no optimizer trains."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            return True
    return any(True for _ in module.buffers())


class Start(NamedTuple):
    """Copies of the parameters and buffers of a module before a training step, by name."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, module: LightningModule) -> Start:
        """Return copies of the tensors of a module."""
        parameters = {key: tensor.detach().clone() for key, tensor in module.named_parameters()}
        return cls(parameters, {key: buffer.clone() for key, buffer in module.named_buffers()})


class Tried(NamedTuple):
    """A training step that is tried.

    Attributes:
        functional: The module.
        call: Computes the loss; see `Functional.call`.
        start: Its parameters and buffers before the step.
        batch: The batch.
    """

    functional: Functional
    call: str | Call
    start: Start
    batch: Any


def clone_tensor(leaf: Any) -> Any:
    """Return a copy of a tensor; other leaves of a batch are returned as they are."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def same_tensors(ours: Any, theirs: Any) -> bool:
    """Return True if two batches have the same structure, and equal tensors of the same types."""
    leaves, structure = tree_flatten(ours)
    others, other_structure = tree_flatten(theirs)
    if structure != other_structure:
        return False
    for leaf, other in zip(leaves, others, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.dtype != other.dtype or not equal_with_nan(leaf, other):
            return False
    return True


def equal_with_nan(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors are equal, where NaN equals NaN."""
    if ours.shape != theirs.shape:
        return False
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def _call_stacked(
    tried: Tried,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    shares_batch: bool = True,
) -> tuple[Any, dict[str, Tensor]]:
    """Return the loss of each of two networks, and their buffers afterwards.

    Args:
        tried: The step.
        parameters, buffers: Of both networks, by name.
        shares_batch: Whether both networks have the batch, or each a copy of its own. Some
            operations have another derivative then.
    """
    functional, call, _, batch = tried
    batch_dim = None
    if not shares_batch:
        batch_dim = 0
        batch = tree_map(lambda tensor: torch.stack([tensor, tensor]), batch)
    over_networks = vmap(
        lambda tensors, buffers, batch: functional.call_and_update(call, tensors, buffers, batch),
        (0, 0, batch_dim),
        randomness="different",
    )
    return over_networks(parameters, buffers, batch)


def reason_against_training(module: LightningModule, call: str | Call, batch: Any) -> str | None:
    """Return why the loss of a batch cannot be trained in a stack; None if it can.

    Args:
        module: The module, in training mode. Its buffers and gradients change.
        call: Computes the loss; see `Functional.call`.
        batch: A training batch.
    """
    name = type(module).__name__
    functional = Functional(module)
    start = Start.of(module)
    tried = Tried(functional, call, start, batch)
    attributes = capture_attributes(module)
    before = capture_rng_state(module)
    examples = tree_map(clone_tensor, batch)
    with torch.no_grad():
        # A step may change an untrained parameter.
        parameters = tree_map(clone_tensor, start.parameters)
        functional.call_and_update(call, parameters, start.buffers, batch)
    if not same_tensors(examples, batch):
        return f"a training step of {name} changes its batch"
    draws = capture_rng_state(module)
    for kind, source in (("numpy", "NumPy"), ("python", "Python"), ("kept", "its own generator")):
        if not equal_states(before[kind], draws[kind]):
            return f"{name} draws random numbers of {source} in a training step"
    with WithoutDropout():
        loss = functional(call, batch)
        if not equal_states(draws, capture_rng_state(module)):
            return f"{name} draws random numbers in a training step other than for dropout"
        if not isinstance(loss, Tensor) or loss.shape != ():
            return f"the loss of {name} is not a scalar tensor"
        module.zero_grad()
        loss.backward()
        reason = _reason_against_vmap(tried, loss) or _reason_against_other_weights(tried)
    if reason is not None:
        return reason
    if not equal_states(attributes, capture_attributes(module)):
        return f"a training step of {name} changes an attribute that is not a buffer"
    if not equal_states(before, draws):
        return _reason_against_dropout(tried)
    return None


def _reason_against_vmap(tried: Tried, loss: Tensor) -> str | None:
    """Return which value of a training step differs under torch.vmap; None if none does.

    Args:
        tried: The step. The module has the gradients and buffers after the step alone.
        loss: The loss of the step alone.
    """
    module = tried.functional.module
    name = type(module).__name__
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            # An optimizer skips it, and a stack would apply weight decay and momentum.
            return f"{key} of {name} has no gradient in a training step"
    for shares_batch in (True, False):
        reason = _reason_against_two(tried, loss, shares_batch)
        if reason is not None:
            return reason
    return None


def _reason_against_two(tried: Tried, loss: Tensor, shares_batch: bool) -> str | None:
    """Return which value differs between two equal networks of a stack and one alone.

    Args:
        tried, loss: As in `_reason_against_vmap`.
        shares_batch: As in `_call_stacked`.
    """
    module, start = tried.functional.module, tried.start
    name = type(module).__name__
    trained = {key for key, parameter in module.named_parameters() if parameter.requires_grad}
    two = stacked(start.parameters, start.parameters)
    for key in trained:
        two[key].requires_grad_()
    buffers = stacked(start.buffers, start.buffers)
    losses, after = _call_stacked(tried, two, buffers, shares_batch)
    if not torch.allclose(losses, loss.detach().expand(2), rtol=TOLERANCE):
        return f"the loss of {name} differs under torch.vmap"
    losses.sum().backward()
    for key, buffer in module.named_buffers():
        if start.buffers[key].shape != buffer.shape:
            return f"a training step of {name} changes the shape of its buffer {key}"
        ours, theirs = after[key], buffer.expand_as(after[key])
        # A buffer may be nan until its value is known.
        nan_in_both = ours.isnan() & theirs.isnan()
        ours, theirs = ours.masked_fill(nan_in_both, 0), theirs.masked_fill(nan_in_both, 0)
        if not _close(ours, theirs, _largest([theirs])):
            return f"the buffer {key} of {name} differs under torch.vmap"
    for key, parameter in module.named_parameters():
        # A step may move an untrained parameter, such as the weights of a momentum teacher.
        is_untrained = key not in trained
        if is_untrained and not _close(two[key], parameter.expand_as(two[key]), 1.0):
            return f"a training step of {name} changes {key} in another way under torch.vmap"
    gradients: dict[str, Tensor] = {}
    for key, parameter in module.named_parameters():
        if key in trained and parameter.grad is not None:
            gradients[key] = parameter.grad
    largest = _largest(list(gradients.values()))
    for key, gradient in gradients.items():
        both = two[key].grad
        if both is None:
            both = torch.zeros_like(two[key])
        if not _close_gradients(both, gradient.expand_as(both), largest):
            return f"the gradient of {key} of {name} differs under torch.vmap"
    return None


@torch.no_grad()
def _reason_against_other_weights(tried: Tried) -> str | None:
    """Return a reason if the loss of a network with other weights differs in a stack.

    A module may keep its parameters in a list too. A stack replaces the parameters alone.
    """
    functional, call, start, batch = tried
    module = functional.module
    moved = moved_tensors({**start.parameters, **start.buffers})
    parameters = stacked(start.parameters, moved)
    losses, _ = _call_stacked(tried, parameters, stacked(start.buffers, moved))
    with holding(module, moved):
        loss = functional(call, batch)
    if not torch.allclose(losses[1], loss, rtol=TOLERANCE, equal_nan=True):
        name = type(module).__name__
        return f"{name} reads weights from attributes that are not its parameters or buffers"
    return None


def moved_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with other values, by name; numbers that are not floating-point are equal."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for key, tensor in tensors.items():
        moved[key] = tensor.detach().clone()
        if tensor.is_floating_point():
            factors = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            moved[key] *= (1 + MOVED * factors).to(tensor)
    return moved


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a module have other values of its parameters and buffers within a block."""
    before = {key: tensor.detach().clone() for key, tensor in tensors_of(module).items()}
    _fill(module, tensors)
    try:
        yield
    finally:
        _fill(module, before)


@torch.no_grad()
def _fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for key, tensor in tensors_of(module).items():
        tensor.copy_(tensors[key])


def stacked(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of two networks, with the names of the first."""
    pairs = {key: [tensor.detach(), second[key].detach()] for key, tensor in first.items()}
    return {key: torch.stack(pair) for key, pair in pairs.items()}


@torch.no_grad()
def _reason_against_dropout(tried: Tried) -> str | None:
    """Return a reason if two equal networks draw the same dropout in a stack; else None."""
    start = tried.start
    parameters = stacked(start.parameters, start.parameters)
    losses, _ = _call_stacked(tried, parameters, stacked(start.buffers, start.buffers))
    if losses[0] == losses[1]:
        name = type(tried.functional.module).__name__
        return f"{name} draws the same random numbers for all networks of a stack"
    return None


@torch.no_grad()
def _reason_against_halves(module: ImageClassifier, batch: tuple[Tensor, Tensor]) -> str | None:
    """Return a reason if a stack divides the batches of a module whose loss is no mean."""
    if trains_on_whole_batches(module, keeps_untrained(module, batch)):
        return None
    x, y = batch
    half = len(y) // 2
    if half == 0:
        return None
    with WithoutDropout():
        loss = module.loss(batch)
        sums = half * module.loss((x[:half], y[:half]))
        sums += (len(y) - half) * module.loss((x[half:], y[half:]))
    if not torch.allclose(sums / len(y), loss, rtol=TOLERANCE):
        return f"the loss of {type(module).__name__} is not the mean over the examples of a batch"
    return None


@torch.no_grad()
def _reason_against_errors(module: ImageClassifier, batch: tuple[Tensor, Tensor]) -> str | None:
    """Return why the errors of a module differ in a stack; leaves it in evaluation mode."""
    name = type(module).__name__
    module.eval()
    before = {key: buffer.clone() for key, buffer in module.named_buffers()}
    draws = capture_rng_state(module)
    single = module.per_example_error(batch).expand(2, -1)
    if not equal_states(draws, capture_rng_state(module)):
        return f"the per_example_error of {name} draws random numbers"
    for key, buffer in module.named_buffers():
        if not equal_with_nan(buffer, before[key]):
            return f"the per_example_error of {name} changes its buffer {key}"
    two = stacked(tensors_of(module), tensors_of(module))
    call = Functional(module).call
    both = vmap(lambda tensors: call("per_example_error", tensors, batch))(two)
    # A validation counts decisions, so these must be equal and not only close.
    same_decisions = torch.equal(is_wrong(both), is_wrong(single))
    if not same_decisions or not torch.allclose(both, single, rtol=TOLERANCE, equal_nan=True):
        return f"the per_example_error of {name} differs under torch.vmap"
    return None


def _largest(tensors: list[Tensor]) -> float:
    """Return the largest absolute value of some tensors."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _close_gradients(ours: Tensor, theirs: Tensor, largest: float) -> bool:
    """Return True if gradients are equal, up to rounding, or but for a few kinks of the loss."""
    return _close(ours, theirs, largest) or bool(
        (ours - theirs).norm() <= KINK_TOLERANCE * theirs.norm()
    )


def _close(ours: Tensor, theirs: Tensor, largest: float) -> bool:
    """Return True if tensors are equal, up to rounding of values as large as `largest`."""
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    return torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE * largest)
