"""Counts the examples of a batch. Steps, pruning passes, validation and ranks all use this count.

A `DataLoader` draws a list of indices for each batch. The length of this list is the number of
examples. So graphs, time-first tensors and packed sequences are counted correctly. Streams and
loaders of a user's class have no lists; then the shapes of the batch decide (`Sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

# What `can_be_cut` requires, for messages.
DIVISIBLE = (
    "batches of tensors whose first dimension is the examples, without lists or objects that might "
    "have parts of single examples"
)
_RECORDS = "_records_examples"  # attribute of the classes that `record_examples` makes


class IndexLists:
    """The index lists of a sampler. Each pass records their lengths.

    Args:
        sampler: The batch sampler of a loader, or its sampler if it yields lists.
    """

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Pass:
        return Pass(iter(self.sampler))


class Pass:
    """One pass over index lists.

    Attributes:
        lengths: The length of each list so far; None for an item that is no list. Loader processes
            draw lists before the training needs them.
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
    if not is_list and not is_array:
        return None
    return len(indices)


def record_examples(loader: Any) -> None:
    """Make the iterators of a DataLoader record how many indices they draw for each batch.

    The loader remains the same object, with the same samplers. Its class is replaced by a subclass.
    Loaders without index lists do not change.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, _RECORDS):
        return
    if isinstance(loader.dataset, IterableDataset):
        # Its lists have the full batch size, even if the last batch is short.
        return
    original: Any = type(loader)
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_index_sampler": property(lambda loader: IndexLists(original._index_sampler.fget(loader))),
        _RECORDS: True,
    }
    loader.__class__ = type(original.__name__, (original,), members)


def examples_drawn(iterator: Any, ahead: int = 0) -> int | None:
    """Return the number of examples of the batch that an iterator yielded last; None if unknown.

    Args:
        iterator: An iterator of a loader, made after `record_examples`.
        ahead: Batches that the iterator has yielded after the batch in question.
    """
    if not isinstance(iterator, _BaseDataLoaderIter) or not getattr(iterator, "_in_order", True):
        return None
    index_lists = iterator._sampler_iter
    number = iterator._num_yielded - 1 - ahead
    if not isinstance(index_lists, Pass) or not 0 <= number < len(index_lists.lengths):
        return None
    return index_lists.lengths[number]


def counted(loader: Any, sizes: Sizes | None = None) -> Iterator[tuple[Any, int | None]]:
    """Yield the batches of a pass, each with its number of examples; None if unknown.

    With a `CombinedLoader`, the examples of its first loader are counted.
    """
    sizes = sizes or Sizes()
    is_combined = isinstance(loader, CombinedLoader)
    if is_combined:
        for each in loader.flattened:
            record_examples(each)
    else:
        record_examples(loader)
    iterator = iter(loader)
    for item in iterator:
        if is_combined:
            batch = item[0]
            number = examples_drawn(first_iterator(loader))
        else:
            batch = item
            number = examples_drawn(iterator)
        if number is None:
            number = sizes.examples_in(batch, batch_size_of(loader))
        yield batch, number


def first_iterator(loader: CombinedLoader) -> Any:
    """Return the iterator of the first loader; None before a pass.

    In the mode "sequential", it is the iterator of the current loader.
    """
    iterators = getattr(loader._iterator, "iterators", None)
    if not iterators:
        return None
    return iterators[0]


def batch_size_of(loader: Any) -> int | None:
    """Return the batch size that a DataLoader declares; None if it declares none."""
    if isinstance(loader, CombinedLoader) and loader.flattened:
        loader = loader.flattened[0]
    if not isinstance(loader, DataLoader):
        return None
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


class Sizes:
    """Counts the examples of batches without index lists, by the sizes of their tensors and lists.

    In a full batch, one of the sizes equals the batch size. `Sizes` looks for it among the lengths
    of tensors, then among their other dimensions, then among the lengths of lists. All later
    batches are counted at the same place.

    Args:
        batch_size: Examples of a full batch; None if unknown.

    Attributes:
        place: The place where examples are counted (see `sizes_of`); None before a full batch.
    """

    def __init__(self, batch_size: int | None = None):
        self.batch_size = batch_size
        self.place: tuple | None = None

    def examples_in(self, batch: Any, batch_size: int | None = None) -> int | None:
        """Return the number of examples of a batch; None if unknown.

        Without a batch size, return the length of the first tensor.

        Args:
            batch: Tensors in lists, dicts and tuples.
            batch_size: Examples of a full batch, as the loader of this batch declares.
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
    """Return the place where a full batch has its batch size; None if there is no such place."""
    if batch_size is None:
        return None
    places = [place for place, size in sizes.items() if size == batch_size]
    for place in places:
        # The tensors in a list of examples may by chance be as long as the list.
        if place[-1] == "list" and _tensor_lengths(sizes, place[:-1]) != {batch_size}:
            return place
    return min(places, key=_place_order, default=None)


def _tensor_lengths(sizes: Mapping[tuple, int], path: tuple) -> set[int]:
    """Return the lengths of the tensors below a path."""
    lengths = set()
    for place, size in sizes.items():
        if place[-1] == 0 and place[: len(path)] == path:
            lengths.add(size)
    return lengths


def _place_order(place: tuple) -> float:
    """Return a sort key: lengths of tensors first, then other dimensions, then lengths of lists."""
    if place[-1] == "list":
        return math.inf
    return place[-1]


def sizes_of(batch: Any) -> dict[tuple, int]:
    """Return all sizes of a batch by place: dimensions of tensors, and lengths of lists.

    A place is the path to a tensor or a list, followed by the number of the dimension or "list".
    """
    sizes: dict[tuple, int] = {}
    _add_sizes(batch, (), sizes)
    return sizes


def _add_sizes(part: Any, path: tuple, sizes: dict[tuple, int]) -> None:
    if isinstance(part, (Tensor, np.ndarray)):
        for dimension, size in enumerate(part.shape):
            sizes[(*path, dimension)] = size
    elif isinstance(part, Mapping):
        for key, value in part.items():
            _add_sizes(value, (*path, key), sizes)
    elif is_dataclass(part) and not isinstance(part, type):
        _add_sizes(vars(part), path, sizes)
    elif isinstance(part, (list, tuple)):
        sizes[(*path, "list")] = len(part)
        for i, value in enumerate(part):
            _add_sizes(value, (*path, i), sizes)


def can_be_cut(batch: Any, examples: int | None) -> bool:
    """Return True if a batch can be split by examples: if each tensor has one row for each example.

    An array of NumPy is like a tensor. A tensor without dimensions, such as a weight, belongs to
    all examples. A batch of graphs cannot be split, because its nodes, edges and labels differ in
    number. An object of another class, such as a dataclass, cannot be split if it holds tensors or
    a list of one entry for each example. A batch also cannot be split if `cut` leaves a list or
    tuple whole that has as many entries as the batch has examples: the two numbers of a size can
    be those of two examples.
    """

    def is_ambiguous(value: Any) -> bool:
        has_entries = isinstance(value, (list, tuple)) and len(value) == examples
        if not has_entries or not _has_no_rows(value):
            return False
        # The fields of the default `collate_fn`: two texts of each of two examples.
        are_fields = all(
            isinstance(each, (list, tuple)) and len(each) == examples for each in value
        )
        return are_fields or not _is_plain_list(value)

    lengths = set()
    for leaf in tree_leaves(batch, is_leaf=is_ambiguous):
        if is_ambiguous(leaf):
            return False
        if _has_rows(leaf):
            lengths.add(len(leaf))
        elif _holds_rows(leaf, set()) or _has_sizes(leaf, examples):
            return False
    return bool(lengths) and lengths == {examples}


def cut(batch: Any, part: slice | Tensor) -> Any:
    """Return some examples of a batch for which `can_be_cut` is true.

    A list or tuple of one text for each example is cut like a tensor, and a list of one number or
    object. A tuple of numbers stays, because it may be a size, such as that of an image.

    Args:
        batch: The batch.
        part: Which examples: a slice, or their indices as a tensor (n,).
    """
    lengths = [len(leaf) for leaf in tree_leaves(batch) if _has_rows(leaf)]

    def has_entries(value: Any) -> bool:
        return _is_plain_list(value) and len(value) == lengths[0]

    def cut_leaf(leaf: Any) -> Any:
        if has_entries(leaf) and isinstance(part, Tensor):
            return type(leaf)(leaf[i] for i in part.tolist())
        if _has_rows(leaf) or has_entries(leaf):
            return leaf[part]
        return leaf

    return tree_map(cut_leaf, batch, is_leaf=has_entries)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0


def _has_no_rows(value: Any) -> bool:
    return not any(_has_rows(leaf) for leaf in tree_leaves(value))


def _holds_rows(value: Any, seen: set[int]) -> bool:
    """Return True if an attribute of an object is a tensor with rows, at any depth.

    Args:
        value: The object.
        seen: The `id` of each object that was searched before.
    """
    if id(value) in seen:
        return False
    seen.add(id(value))
    for part in tree_leaves(list(getattr(value, "__dict__", {}).values())):
        if _has_rows(part) or _holds_rows(part, seen):
            return True
    return False


def _has_sizes(leaf: Any, examples: int | None) -> bool:
    """Return True if a part of a batch holds tensors, or a list of one entry for each example."""
    return any(place[-1] != "list" or size == examples for place, size in sizes_of(leaf).items())


def _is_plain_list(value: Any) -> bool:
    """Return True for a list without tensors, whose entries are of one class, or a tuple of texts.

    The default `collate_fn` makes such a tuple. A pair of different things is no such list.
    """
    is_of_texts = type(value) is tuple and all(isinstance(entry, (str, bytes)) for entry in value)
    if type(value) is not list and not is_of_texts:
        return False
    if len({type(entry) for entry in value}) != 1:
        return False
    return not any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in tree_leaves(value))
