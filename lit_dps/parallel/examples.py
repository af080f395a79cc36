"""How many examples a batch has: the one definition, for steps, passes, checks and ranks.

A `DataLoader` draws a list of indices for each batch, and the length of that list is the number of examples. So the
nodes of graphs, time-first tensors and packed sequences are counted right. Without such lists, as of a stream or of a
loader of the user's own class, the number is read off the batch (`Sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

_RECORDS = "_records_examples"  # of the classes that `record_examples` makes


class IndexLists:
    """The lists of indices that a sampler gives, whose lengths are kept for each pass.

    Args:
        sampler: The batch sampler of a loader, or its sampler if that gives lists.
    """

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Pass:
        return Pass(iter(self.sampler))


class Pass:
    """One pass over lists of indices.

    Attributes:
        lengths: The length of each list so far; None where it is no list. Loader processes draw ahead of the training.
    """

    def __init__(self, indices: Iterator[Any]):
        self.indices = indices
        self.lengths: list[int | None] = []

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        indices = next(self.indices)
        self.lengths.append(_length_of(indices))
        return indices


def _length_of(indices: Any) -> int | None:
    is_list = isinstance(indices, (list, tuple, range))
    is_array = isinstance(indices, (Tensor, np.ndarray)) and indices.ndim == 1
    return len(indices) if is_list or is_array else None


def record_examples(loader: Any) -> None:
    """Lets the iterators of a DataLoader keep how many indices they draw for each batch.

    The loader remains the same object, with the same samplers. Its class becomes a subclass of its own class.
    Loaders without lists of indices stay as they are.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, _RECORDS):
        return
    if isinstance(loader.dataset, IterableDataset):
        # The lists have the full batch size there, also of a last batch that is short.
        return
    plain = type(loader)
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    sampler = property(lambda loader: IndexLists(plain._index_sampler.fget(loader)))
    loader.__class__ = type(plain.__name__, (plain,), {**names, "_index_sampler": sampler, _RECORDS: True})


def examples_drawn(iterator: Any, ahead: int = 0) -> int | None:
    """Return the number of indices of the batch that an iterator gave last; None if the iterator does not know it.

    Args:
        iterator: Of a loader after `record_examples`.
        ahead: Batches that the iterator has given since.
    """
    if not isinstance(iterator, _BaseDataLoaderIter) or not getattr(iterator, "_in_order", True):
        return None
    drawn, place = iterator._sampler_iter, iterator._num_yielded - 1 - ahead
    if not isinstance(drawn, Pass) or not 0 <= place < len(drawn.lengths):
        return None
    return drawn.lengths[place]


def counted(loader: Any, sizes: Sizes | None = None) -> Iterator[tuple[Any, int | None]]:
    """Yield the batches of a pass, each with its number of examples; None if that cannot be known.

    Of a `CombinedLoader` the examples are those of its first loader.
    """
    sizes = sizes or Sizes()
    together = isinstance(loader, CombinedLoader)
    for each in loader.flattened if together else [loader]:
        record_examples(each)
    iterator = iter(loader)
    for item in iterator:
        if together:
            batch, source = item[0], first_iterator(loader)
        else:
            batch, source = item, iterator
        number = examples_drawn(source)
        yield batch, sizes.examples_in(batch, batch_size_of(loader)) if number is None else number


def first_iterator(loader: CombinedLoader) -> Any:
    """Return the iterator of the first of several loaders, or of the loader whose turn it is; None before a pass."""
    iterators = getattr(loader._iterator, "iterators", None)
    return iterators[0] if iterators else None


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size that a DataLoader promises; None if it promises none."""
    if isinstance(loader, CombinedLoader):
        loader = loader.flattened[0] if loader.flattened else None
    if not isinstance(loader, DataLoader):
        return None
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


class Sizes:
    """Finds which size of a batch counts its examples, where no list of indices tells it.

    That is a size equal to the batch size in a full batch: the length of a tensor, another of its dimensions, or the
    length of a list, in this order. The same place counts all later batches.

    Args:
        batch_size: Examples of a full batch; None if nobody knows.

    Attributes:
        place: Where the examples are counted; None before a full batch.
    """

    def __init__(self, batch_size: int | None = None):
        self.batch_size = batch_size
        self.place: tuple | None = None

    def examples_in(self, batch: Any, batch_size: int | None = None) -> int | None:
        """Return the number of examples of a batch; None if it cannot be known.

        Without a batch size it is the length of the first tensor.

        Args:
            batch: Tensors in lists, dicts and tuples.
            batch_size: Examples of a full batch, as its own loader promises.
        """
        sizes = sizes_of(batch)
        if self.place is None:
            self.place = _place_of(sizes, batch_size or self.batch_size)
        if self.place is not None:
            return sizes.get(self.place)
        lengths = [length for place, length in sizes.items() if place[-1] == 0]
        known = batch_size or self.batch_size
        if not lengths or (known is not None and len(set(lengths)) > 1):
            return None
        return lengths[0]


def _place_of(sizes: Mapping[tuple, int], batch_size: int | None) -> tuple | None:
    if batch_size is None:
        return None
    places = [place for place, size in sizes.items() if size == batch_size]
    lists = [place[:-1] for place in places if place[-1] == "list"]
    for way in lists:
        # Items of a list of examples, such as images, may by chance be as long as the list.
        lengths = [size for place, size in sizes.items() if place[-1] == 0 and place[: len(way)] == way]
        if set(lengths) != {batch_size}:
            return (*way, "list")
    return min(places, key=_rank, default=None)


def _rank(place: tuple) -> int:
    """First the lengths of tensors, then their other dimensions, then the lengths of lists."""
    return 10**6 if place[-1] == "list" else place[-1]


def sizes_of(batch: Any) -> dict[tuple, int]:
    """Return all sizes of a batch by place: dimensions of tensors, and lengths of lists.

    A place is the way to a tensor or a list, and the number of the dimension, or "list".
    """
    found: dict[tuple, int] = {}
    _add_sizes(batch, (), found)
    return found


def _add_sizes(part: Any, way: tuple, found: dict[tuple, int]) -> None:
    if isinstance(part, (Tensor, np.ndarray)):
        for dimension, size in enumerate(part.shape):
            found[(*way, dimension)] = size
    elif isinstance(part, Mapping):
        for key, value in part.items():
            _add_sizes(value, (*way, key), found)
    elif is_dataclass(part) and not isinstance(part, type):
        _add_sizes(vars(part), way, found)
    elif isinstance(part, (list, tuple)):
        found[(*way, "list")] = len(part)
        for i, value in enumerate(part):
            _add_sizes(value, (*way, i), found)


def can_be_cut(batch: Any, examples: int | None) -> bool:
    """Return whether some of the examples of a batch are a batch: whether all its tensors have their length.

    A tensor without dimensions, such as a weight, belongs to all examples. Tensors that differ in length, as nodes,
    edges and labels of graphs do, cannot be cut.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0]
    return bool(tensors) and all(len(leaf) == examples for leaf in tensors)


def cut(batch: Any, part: slice) -> Any:
    """Return the batch of some of the examples of a batch that can be cut."""
    return tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.ndim > 0 else leaf, batch)
