"""Pruner: a pruning method, one file each; and the exact global top-k that they share."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import instance_of, named_class
from lit_dps.core.trial import (
    BY,
    CHANGE_EVERY,
    KEPT,
    PRUNABLE,
    TRAINED,
    UNSCORED,
    check_sparsity,
)
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network

# Scores of all elements, by the name of their parameter. The elements with the highest are kept.
Scores = Mapping[str, Tensor]

# Attributes of a pruner that were renamed. Plug-ins may use the earlier names for one more release.
RENAMED = {"exact": "hits_count", "sums": "batch_invariant"}


@dataclass(frozen=True)
class MaskUpdate:
    """A moment of training at which a method changes the mask.

    Tensors are those of the run: a method reads them and does not change them.

    Attributes:
        step: Optimizer steps taken so far.
        max_steps: Optimizer steps of a run that does not reach its goal.
        sparsity: The sparsity of the run, in (0, 1), as `Pruner.mask` receives it.
        mask: The present mask.
        weights: Weights of the masked parameters by name. Pruned ones are 0.
        gradients: Gradients of the last step's batch by name, also of pruned weights.
        generator: The source of all random numbers, on the CPU. It depends on the run's seed and
            on the step.
    """

    step: int
    max_steps: int
    sparsity: float
    mask: Mask
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    generator: torch.Generator


class NanScoresError(ConfigError):
    """Scores that are nan.

    Args:
        text: Which scores are nan.
        method: Name of the method.
    """

    def __init__(self, text: str, method: str = "top_k"):
        self.text = text
        super().__init__("pruning.method", method, f"a method with finite scores; {text}")

    def of_method(self, pruner: Pruner) -> NanScoresError:
        """Return the error with the name of a method."""
        return NanScoresError(self.text, type(pruner).__name__)


class Pruner(ABC):
    """A method that prunes at initialization. Its constructor takes `pruning.options`.

    Attributes:
        passes: Passes over the training split, at most; 0 for a method without data.
        batch_invariant: Whether the mask does not depend, up to rounding, on how a pass is divided
            into batches. The loss must be a mean over examples.
        hits_count: Whether a mask keeps exactly round(m (1 - sparsity)) of its m elements. If it
            cannot, as with whole nodes, the table shows how many it keeps.
        counts: What a sparsity is a share of if the method does not hit the count, in one word such
            as "nodes". A note of the report uses it.
        every: Optimizer steps between changes of the mask by `next_mask`; None if the mask stays.
    """

    passes: int = 1
    hits_count: bool = True
    counts: str = "weights"
    batch_invariant: bool = False
    every: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in RENAMED.items():
            if old in cls.__dict__:
                _warn_renamed(cls.__name__, old)
                setattr(cls, new, cls.__dict__[old])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RENAMED:
            _warn_renamed(type(self).__name__, name)
            super().__setattr__(RENAMED[name], value)
        super().__setattr__(name, value)

    @abstractmethod
    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        """Return the mask of a network.

        Args:
            network: A copy of the network, with its initial weights.
            sparsity: Share of elements to prune, in (0, 1).
            generator: The source of all random numbers. It is on the CPU, so that all devices draw
                the same numbers.

        Returns:
            A mask of the scored parameters. With `hits_count` it keeps exactly round(m (1 -
            sparsity)) of their m elements.
        """

    def check_sparsity(self, sparsity: float) -> None:  # noqa: B027  # optional
        """Raise ConfigError for a sparsity that the method cannot make, before a study begins."""

    def next_mask(self, update: MaskUpdate) -> Mask:
        """Return the mask after a step of training; called after each `every`-th step.

        Weights that grow again begin at 0, without momentum. With `hits_count` the mask
        keeps as many elements as before. The mask depends on the update and on the arguments of
        the constructor alone: a resumed run has a new pruner, whose `mask` was not called.
        """
        return update.mask


class OneShot(Pruner):
    """A method whose scores do not depend on the sparsity.

    A study computes them once for all cells of a point.

    Attributes:
        stackable: Whether `scores` can score several networks at once. Their parameters then have a
            first dimension for the networks, and `Network.losses` yields sums of their losses. The
            scores may be elementwise functions of parameters and gradients, and not random.
    """

    stackable: bool = False

    @abstractmethod
    def scores(self, network: Network, generator: torch.Generator) -> Scores:
        """Return the scores of all elements that can be pruned; see `mask` for the arguments."""

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        return top_k(self.scores(network, generator), sparsity)


def _warn_renamed(name: str, old: str) -> None:
    text = f"pruner {name}: {old!r} is deprecated; use {RENAMED[old]!r}"
    warnings.warn(text, FutureWarning, stacklevel=3)


PRUNERS: dict[str, type[Pruner]] = {}  # by name; `lit_dps.pruning` adds them


def pruner_of(
    method: str, options: Mapping[str, Any] | None = None, key: str = "pruning.method"
) -> Pruner:
    """Return a pruning method.

    Args:
        method: Its name or class path.
        options: Arguments of its constructor.
        key: The configuration key of the method, for messages.

    Raises:
        ConfigError: if there is no such method, or if it does not take the options.
    """
    kind = named_class(key, method, PRUNERS, Pruner)
    return instance_of(kind, "pruning.options", method, options)


def prune(
    pruner: Pruner,
    network: Callable[[], AbstractContextManager[Network]],
    sparsity: float,
    seed: int,
    name: str,
    scores: Scores | None = None,
) -> tuple[Mask, Scores | None]:
    """Return the mask of a network, and its scores if they are valid for other sparsities.

    Args:
        pruner: The method.
        network: Makes the copy that the method works on.
        sparsity: Share of elements to prune.
        seed: Seed of the method's generator.
        name: Name of the module, for messages.
        scores: The scores, if they were computed before.

    Raises:
        ConfigError: if there is nothing to prune, if a mask keeps a wrong number of elements, or if
            scores of a network with a finite gradient are nan.
    """
    generator = torch.Generator().manual_seed(seed)
    try:
        if scores is None:
            with network() as copy:
                if not copy.parameters:
                    allowed = f"0, because {name} has no trainable weights that can be pruned"
                    raise ConfigError("study.sparsities", sparsity, allowed)
                if not isinstance(pruner, OneShot):
                    mask = pruner.mask(copy, sparsity, generator)
                    _check(mask, copy, sparsity, pruner)
                    return mask, None
                scores = pruner.scores(copy, generator)
        return top_k(scores, sparsity), scores
    except NanScoresError as error:
        with network() as copy:
            if _is_finite(copy):
                raise error.of_method(pruner) from None
            # The network has diverged, so any mask will do: the first validation ends the trial.
            equal = {name: torch.zeros_like(p) for name, p in copy.parameters.items()}
        return top_k(equal, sparsity), scores


def _is_finite(network: Network) -> bool:
    """Return True if the weights and the gradient of a network are finite."""
    if not all_finite(network.parameters.values()):
        return False
    return all_finite(network.gradients().values())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all elements of some tensors are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _check(mask: Mask, network: Network, sparsity: float, pruner: Pruner) -> None:
    """Raise ConfigError for a mask of other parameters, or with a wrong number of elements."""
    method = type(pruner).__name__
    allowed = network.parameters
    if not pruner.hits_count:
        allowed = dict(network.module.named_parameters())
    for name, tensor in mask.items():
        if name not in allowed or tensor.shape != allowed[name].shape:
            raise ConfigError(
                "pruning.method", method, f"a mask of prunable parameters; {name} is not prunable"
            )
    keep, total = mask.count()
    if keep == 0:
        raise ConfigError("pruning.method", method, "a mask that keeps at least one weight")
    expected = round(total * (1 - sparsity))
    if pruner.hits_count and keep != expected:
        raise ConfigError("pruning.method", method, f"a mask that keeps {expected}, not {keep}")


def check_count(option: str, value: int, allowed: str = "at least 1") -> None:
    """Raise ConfigError unless the value of an option is at least 1."""
    if value < 1:
        raise ConfigError(f"pruning.options.{option}", value, allowed)


def top_k(scores: Scores, sparsity: float) -> Mask:
    """Return the mask that keeps the round(m (1 - sparsity)) highest of all m scores.

    Python rounds half to even. Of equal scores, the first ones are kept, as by TensorFlow's top_k
    in the authors' code.

    Raises:
        ConfigError: if the sparsity is outside [0, 1), or if no element remains.
        NanScoresError: if a score is nan.
    """
    check_sparsity("pruning.sparsity", sparsity)
    refuse_nan(scores)
    flat = torch.cat([score.flatten() for score in scores.values()])
    keep = round(len(flat) * (1 - sparsity))
    if keep == 0:
        raise ConfigError(
            "pruning.sparsity",
            sparsity,
            f"low enough to keep at least one of {len(flat)} parameters",
        )
    kept = _highest(flat, keep)
    tensors = {}
    start = 0
    for name, score in scores.items():
        tensors[name] = kept[start : start + score.numel()].view(score.shape)
        start += score.numel()
    return Mask(tensors, by_place=int((flat[kept] == 0).sum()))


def refuse_nan(scores: Scores) -> None:
    """Raise NanScoresError if a score is nan, because its position alone would decide."""
    for name, score in scores.items():
        count = int(score.isnan().sum())
        if count:
            raise NanScoresError(f"{name} has {count} nan among {score.numel()}")


def _highest(scores: Tensor, number: int) -> Tensor:
    """Return True for each of the highest scores; of equal scores, for the first ones.

    Args:
        scores: Shape (elements,), without nan.
        number: How many scores to select, at least 1.
    """
    # This takes a seventh of the time of a stable sort, which has the same result.
    lowest = torch.topk(scores, number, sorted=False).values.min()
    selected = scores > lowest
    equal = (scores == lowest).nonzero().flatten()
    selected[equal[: number - int(selected.sum())]] = True
    return selected


def set_unscored_flags(flags: dict[str, float], mask: Mask) -> None:
    """Set the `TrialResult.flags` of elements that a mask keeps by their position, if any."""
    for name in (UNSCORED, KEPT):
        flags.pop(name, None)
    if mask.by_place:
        flags[UNSCORED] = mask.by_place
        flags[KEPT] = mask.count().kept


def mask_flags(mask: Mask, pruner: Pruner, trained: int) -> dict[str, float]:
    """Return the `TrialResult.flags` of a mask; often there are none.

    Args:
        mask: The mask.
        pruner: The method that made it.
        trained: Number of elements of all trained parameters.
    """
    kept, total = mask.count()
    flags: dict[str, float] = {}
    set_unscored_flags(flags, mask)
    if not pruner.hits_count:
        flags[BY + re.sub(r"\W", "_", pruner.counts)] = 1
    if 2 * total < trained:
        flags[PRUNABLE] = total
        flags[TRAINED] = trained
    if pruner.every is not None:
        flags[CHANGE_EVERY] = pruner.every
    return flags
