"""Hashes of data without a digest of their own: of the data sets' tensors and of some examples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, Subset

from lit_dps.provenance import UNKNOWN
from lit_dps.store import sobol_point
from lit_dps.study.hardware import cpu_model
from lit_dps.study.setup import StudySetup
from lit_dps.training.generators import isolated
from lit_dps.trial import Cell, Trial

LENGTH = 16  # hexadecimal digits of a hash
EXAMPLES = 64  # of each data set, evenly spaced
BATCHES = 4  # of a stream
MAX_BYTES = 2**28  # of a tensor; a larger one is hashed in evenly spaced rows
DEPTH = 4  # of nested examples


def data_hashes(setup: StudySetup) -> dict[str, list[str]]:
    """Return the hashes of the data that a study trains and validates on.

    Data with a `digest` give that. Of others the training and validation data sets are read twice, each time made anew
    under the seeds of point 0: what differs between the two is `UNKNOWN`.

    Returns:
        Values of the grid's axes of the data, such as "noise=0.5"; "" without such axes -> hashes as of
        `lit_dps.provenance.DATA`.
    """
    study, hashes = setup.study, {}
    point = sobol_point(study.space, study.seed, 0, study.scramble)
    for cell in study.cells:
        axes = tuple(pair for pair in cell.others if pair[0].startswith("data."))
        name = " ".join(f"{key.removeprefix('data.')}={value}" for key, value in axes)
        if name not in hashes:
            trial = Trial(Cell(min(study.batch_sizes), 0.0, cell.others), 0, point, study.seed)
            hashes[name] = _hashes_of(setup, trial)
    return hashes


def _hashes_of(setup: StudySetup, trial: Trial) -> list[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums round otherwise with more
    try:
        first = _read(setup, trial)
        return first if len(first) < 3 or first == _read(setup, trial) else UNKNOWN
    except Exception:  # data that only a running trainer can read, whatever their class raises
        return UNKNOWN
    finally:
        torch.set_num_threads(threads)


def _read(setup: StudySetup, trial: Trial) -> list[str]:
    with setup.workload.traceless() as workload, isolated(seed=trial.seed_for("order")):
        built = workload.build(trial)
        data, trainer = built.data, Trainer(**built.trainer)
        data.trainer = trainer
        trainer.strategy.connect(built.module)
        data.prepare_data()
        data.setup("fit")
        digest = getattr(data, "digest", None)
        if digest is not None or type(data).__module__.startswith("lit_dps."):
            return [str(digest)[:LENGTH]]
        hasher = Hasher()
        for loaders in (data.train_dataloader(), data.val_dataloader()):
            for loader in _each(loaders):
                _add_loader(hasher, loader, trial.cell.batch_size)
        return hasher.hashes


def fingerprint(value: Any) -> str:
    """Return a hash of a nested value, such as a batch or a state: of its numbers, texts and arrays, to the bit."""
    hasher = Hasher()
    hasher.add(value)
    return " ".join(hasher.hashes[:2])


class Hasher:
    """Hashes examples: whole numbers, texts and shapes in one hash, floats in another."""

    def __init__(self):
        self._exact, self._floats = hashlib.sha256(), hashlib.sha256()

    @property
    def hashes(self) -> list[str]:
        """The hash of what is exact, that of the floats, and that of what decides how floats are rounded."""
        context = f"{torch.__version__} {np.__version__} {cpu_model()}"
        found = self._exact, self._floats, hashlib.sha256(context.encode())
        return [each.hexdigest()[:LENGTH] for each in found]

    def add(self, value: Any, depth: int = DEPTH) -> None:
        """Add an example, a batch or a part of one. Of objects that it does not know the class and the attributes."""
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            self._add_array(value)
        elif isinstance(value, float):
            self._floats.update(repr(value).encode())
        elif isinstance(value, str) and os.sep in value:
            pass  # a path, which may be another on another machine
        elif value is None or isinstance(value, (bool, int, str, bytes)):
            self._exact.update(repr(value).encode())
        elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow
            self._exact.update(repr(value.size).encode() + value.tobytes())
        elif depth:
            self._add_nested(value, depth - 1)

    def _add_nested(self, value: Any, depth: int) -> None:
        self._exact.update(type(value).__name__.encode())
        if isinstance(value, Mapping):
            parts: Iterable[Any] = [part for key in sorted(value, key=str) for part in (str(key), value[key])]
        elif isinstance(value, (list, tuple)):
            parts = value
        else:
            parts = getattr(value, "__dict__", {}).values()
        for part in parts:
            self.add(part, depth)

    def add_tensors(self, dataset: Any) -> None:
        """Add the tensors and arrays that a data set keeps as attributes, whole."""
        for value in vars(dataset).values():
            parts = value if isinstance(value, (list, tuple)) and len(value) <= EXAMPLES else [value]
            for part in parts:
                if isinstance(part, (Tensor, np.ndarray)):
                    self._add_array(part)
        if isinstance(dataset, Subset):
            self._add_array(np.asarray(dataset.indices))
            self.add_tensors(dataset.dataset)

    def _add_array(self, value: Tensor | np.ndarray | np.generic) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu().to_dense()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        value = np.asarray(value)
        self._exact.update(f"{value.dtype} {value.shape}".encode())
        if value.nbytes > MAX_BYTES:
            value = value[:: -(-value.nbytes // MAX_BYTES)]
        if value.dtype == object:
            self.add(value.tolist(), depth=1)
        elif value.dtype.kind in "fc":
            self._floats.update(np.ascontiguousarray(value))
        else:
            self._exact.update(np.ascontiguousarray(value).tobytes())


def _each(loaders: Any) -> list[Any]:
    if isinstance(loaders, CombinedLoader):
        loaders = loaders.iterables
    return tree_leaves(loaders)


def _add_loader(hasher: Hasher, loader: Any, batch_size: int) -> None:
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if not is_stream and hasattr(dataset, "__len__"):
        _add_dataset(hasher, dataset)
        return
    hasher.add(batch_size)  # the order of a stream may depend on it
    for batch in islice(loader, BATCHES):
        hasher.add(batch)


def _add_dataset(hasher: Hasher, dataset: Any) -> None:
    size = len(dataset)
    hasher.add(size)
    hasher.add_tensors(dataset)
    for index in np.linspace(0, size - 1, min(size, EXAMPLES)).astype(int).tolist():
        hasher.add(dataset[index])
