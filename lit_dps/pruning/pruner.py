"""Pruner: a pruning method, one file each; and the exact global top-k that they share."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError
from lit_dps.core.registry import named
from lit_dps.core.trial import BY, KEPT, PRUNABLE, TRAINED, UNSCORED, check_sparsity
from lit_dps.pruning.mask import Mask
from lit_dps.pruning.network import Network

Scores = Mapping[str, Tensor]  # of each element of the parameters, by name: the highest are kept


# Attributes of a pruner that were renamed. Plug-ins may use the earlier names for one more release.
RENAMED = {"exact": "hits_count", "sums": "batch_invariant"}


class Pruner(ABC):
    """A method that prunes at initialization. Its constructor takes `pruning.options`.

    Attributes:
        passes: Passes over the training split, at most; 0 for a method without data.
        batch_invariant: Whether the mask does not depend, up to rounding, on how a pass is divided
            into batches. The loss must be a mean over examples.
        hits_count: Whether a mask keeps exactly round(m (1 - sparsity)) of its m elements. If it
            cannot, as with whole nodes, the table says what it keeps.
        counts: What a sparsity is a share of if the method does not hit the count, in one word such
            as "nodes". A note below the table uses it.
    """

    passes: int = 1
    hits_count: bool = True
    counts: str = "weights"
    batch_invariant: bool = False

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
        """The mask of a network.

        Args:
            network: A copy of the network, with the weights that are trained from.
            sparsity: Share to prune, in (0, 1).
            generator: All that is random comes from it: a CPU one, so that every device draws the
                same.

        Returns:
            A mask of the parameters that were scored; of their m elements it keeps exactly round(m
            (1 - sparsity)), if the method has `hits_count`.
        """


class OneShot(Pruner):
    """A method whose scores serve every sparsity: a study takes them once for all the cells of a
    point."""

    @abstractmethod
    def scores(self, network: Network, generator: torch.Generator) -> Scores:
        """The scores of all elements that can be pruned; arguments as of `mask`."""

    def mask(self, network: Network, sparsity: float, generator: torch.Generator) -> Mask:
        return top_k(self.scores(network, generator), sparsity)


def _warn_renamed(name: str, old: str) -> None:
    text = f"pruner {name}: {old!r} is deprecated; use {RENAMED[old]!r}"
    warnings.warn(text, FutureWarning, stacklevel=3)


PRUNERS: dict[str, type[Pruner]] = {}  # by name: `lit_dps.pruning` enters them


def pruner_of(
    method: str, options: Mapping[str, Any] | None = None, key: str = "pruning.method"
) -> Pruner:
    """The pruning method of a name or class path, as a key of the configuration has it, with its
    constructor's options.

    Raises:
        ConfigError: if there is none, or it does not take the options.
    """
    kind = named(
        key, method, PRUNERS, "Pruner", lambda f: isinstance(f, type) and issubclass(f, Pruner)
    )
    try:
        return kind(**(options or {}))
    except TypeError as error:
        raise ConfigError(
            "pruning.options", dict(options or {}), f"what {method} takes: {error}"
        ) from error


def prune(
    pruner: Pruner,
    network: Callable[[], AbstractContextManager[Network]],
    sparsity: float,
    seed: int,
    name: str,
    known: Scores | None = None,
) -> tuple[Mask, Scores | None]:
    """The mask that a method gives a network, and the scores behind it if they serve other
    sparsities.

    Args:
        pruner: The method.
        network: Makes the copy that it works on.
        sparsity: Share to prune.
        seed: Of the method's generator.
        name: Of the module, for messages.
        known: The scores, where they were taken before.

    Raises:
        ConfigError: where there is nothing to prune, or a mask does not keep what it should.
    """
    nothing = ConfigError(
        "study.sparsities", sparsity, f"0 for {name}: it trains no weights that can be pruned"
    )
    generator = torch.Generator().manual_seed(seed)
    if isinstance(pruner, OneShot):
        if known is None:
            with network() as copy:
                if not copy.parameters:
                    raise nothing
                known = pruner.scores(copy, generator)
        return top_k(known, sparsity), known
    with network() as copy:
        if not copy.parameters:
            raise nothing
        mask = pruner.mask(copy, sparsity, generator)
        _check(mask, copy, sparsity, pruner)
    return mask, None


def _check(mask: Mask, network: Network, sparsity: float, pruner: Pruner) -> None:
    method, kept = type(pruner).__name__, mask.kept()
    allowed = network.parameters if pruner.hits_count else dict(network.module.named_parameters())
    for name, tensor in mask.items():
        if name not in allowed or tensor.shape != allowed[name].shape:
            raise ConfigError(
                "pruning.method", method, f"a mask of prunable parameters; its {name} is none"
            )
    keep, total = (sum(counts) for counts in zip(*kept.values(), strict=True)) if kept else (0, 0)
    if keep == 0:
        raise ConfigError("pruning.method", method, "a mask that keeps something")
    if pruner.hits_count and keep != round(total * (1 - sparsity)):
        raise ConfigError(
            "pruning.method",
            method,
            f"a mask that keeps {round(total * (1 - sparsity))}, not {keep}",
        )


def top_k(scores: Scores, sparsity: float) -> Mask:
    """Keeps the round(m (1 - sparsity)) highest of all m scores.

    Python's rounding (half to even); ties go to the lower index in the order of the scores, as
    TensorFlow's top_k does in the authors' code.

    Raises:
        ConfigError: if the sparsity is outside [0, 1), or leaves no parameter.
    """
    check_sparsity("pruning.sparsity", sparsity)
    flat = torch.cat([score.flatten() for score in scores.values()])
    keep = round(len(flat) * (1 - sparsity))
    if keep == 0:
        raise ConfigError(
            "pruning.sparsity", sparsity, f"at least one of {len(flat)} parameters must be kept"
        )
    order = torch.sort(flat, descending=True, stable=True).indices
    kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    kept[order[:keep]] = True
    parts = kept.split([score.numel() for score in scores.values()])
    tensors = {
        name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)
    }
    return Mask(tensors, by_place=int((flat[kept] == 0).sum()))


def mask_flags(mask: Mask, pruner: Pruner, trained: int) -> dict[str, float]:
    """What a reader of the table should know of a mask, as in `TrialResult.flags`; mostly
    nothing.

    Args:
        mask: The mask.
        pruner: The method that made it.
        trained: Elements of all parameters that are trained.
    """
    kept, total = (sum(counts) for counts in zip(*mask.kept().values(), strict=True))
    flags: dict[str, float] = {}
    if mask.by_place:
        flags[UNSCORED] = mask.by_place
        flags[KEPT] = kept
    if not pruner.hits_count:
        flags[BY + re.sub(r"\W", "_", pruner.counts)] = 1
    if 2 * total < trained:
        flags[PRUNABLE] = total
        flags[TRAINED] = trained
    return flags
