"""ShardLoader: a loader of whole batches as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks


class ShardLoader:
    """This rank's part of every batch of a loader that is the same on all ranks.

    A rank without a part of a training batch gets the batch's first example, at a share of 0: it has to take part in
    adding up the gradients. In evaluation such a batch is left out, and nothing is padded.

    Args:
        whole: The loader. What it draws from torch's global generator is the same on all ranks.
        shares: Takes, by its index, the share of each batch that this rank's part is, for training; None for
            evaluation.

    Attributes:
        seen: Examples of this rank's parts since the last pass began.

    Raises:
        ConfigError: for batches without tensors, or that are not the same on all ranks.
    """

    def __init__(self, whole: Iterable[Any], shares: dict[int, float] | None = None):
        self.whole, self.shares, self.seen = whole, shares, 0

    def __len__(self) -> int:
        return len(self.whole)  # TypeError where that one has no length, as Lightning expects

    def __iter__(self) -> Iterator[Any]:
        self.seen = 0
        if self.shares is not None:
            self.shares.clear()
            # dropout draws differently on parts of different size; the next order must not depend on it
            torch.set_rng_state(ranks.broadcast(torch.get_rng_state()))
        for i, batch in enumerate(self.whole):
            n = length(batch)
            if self.shares is None:
                mine = ranks.shard(n, turn=i)
                if mine.stop == mine.start:
                    continue
            else:
                if i == 0:
                    _check_same(batch)
                mine = ranks.shard(n)
                self.shares[i] = (mine.stop - mine.start) / n
                if mine.stop == mine.start:
                    mine = slice(0, 1)
            self.seen += mine.stop - mine.start
            yield tree_map(lambda x, n=n, mine=mine: x[mine] if _of_length(x, n) else x, batch)


def whole(loader: Any) -> Any:
    """The loader of whole batches."""
    return loader.whole if isinstance(loader, ShardLoader) else loader


def length(batch: Any) -> int:
    """The number of examples in a batch: the length of its first tensor."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ConfigError("trainer.strategy", "ddp", "for batches of tensors, with the examples as first dimension")


def _of_length(leaf: Any, n: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == n


def _check_same(batch: Any) -> None:
    sums = [float(leaf.double().sum()) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    of_all_ranks = ranks.all_gather(repr(sums))
    if len(set(of_all_ranks)) > 1:
        raise ConfigError(
            "trainer.strategy",
            "ddp",
            "for a train dataloader that is the same on all ranks: its order may come from torch's generator alone",
        )
