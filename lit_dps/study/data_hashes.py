"""Hashes of data that declare no digest: of the data sets' tensors and of some examples."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, Subset

from lit_dps.core.environment import UNKNOWN
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Trial
from lit_dps.study.hardware import cpu_model
from lit_dps.study.preflight.varied_trials import trials_with_each_choice
from lit_dps.study.setup import StudySetup
from lit_dps.training import lightning_private
from lit_dps.training.deterministic import one_thread
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.workload import Built

LENGTH = 16  # hexadecimal digits of a hash
HASH_LENGTHS = (32, 40, 56, 64, 96, 128)  # hexadecimal digits of MD5, SHA-1 and SHA-2
EXAMPLES = 64  # hashed examples of a data set, evenly spaced
BATCHES = 4  # hashed batches of a stream
MAX_BYTES = 2**28  # of a tensor; only evenly spaced rows of a larger tensor are hashed
DEPTH = 4  # levels of nested examples


def data_hashes(setup: StudySetup) -> dict[str, list[str]]:
    """Return the hashes of the data that a study trains and validates on.

    If the data module has a `digest`, return the digest. Otherwise the data sets are made twice
    under the seeds of point 0 and read; if the two differ, the hashes are `UNKNOWN`.

    Returns:
        Hashes by the values of the data's axes, such as "noise=0.5" ("" without such axes). The
        other choices of the search follow, such as "noise=0.5 file=b.pt". See
        `lit_dps.core.environment.DATA`.
    """
    hashes = {}
    for name, trial in _trials_by_data(setup).items():
        hashes[name] = _hashes_of(setup, trial)
    return hashes


def _trials_by_data(setup: StudySetup) -> dict[str, Trial]:
    """Return trials with each value of the data's axes and choices, by these values.

    Choices of the first sample are in no name, because earlier versions stored the hashes so.
    """
    study = setup.study
    trials: dict[str, Trial] = {}
    for cell in study.cells:
        dense = Cell(min(study.batch_sizes), 0.0, cell.axes)
        first = Trial(dense, 0, setup.sample(0), study.seed)
        for trial in trials_with_each_choice(setup, first):
            values = dict(cell.axes)
            for key, value in trial.params.items():
                if value != first.params[key]:
                    values[key] = value
            parts = []
            for key, value in values.items():
                if key.startswith("data."):
                    parts.append(f"{key.removeprefix('data.')}={value}")
            trials.setdefault(" ".join(parts), trial)
    return trials


def check_validation_data(setup: StudySetup, trial: Trial) -> list[str]:
    """Return a note if a trial validates on other data at the next point of the search.

    A data module that splits its data in `setup`, without a seeded generator, splits them by the
    seed of the point.

    Args:
        setup: The study.
        trial: A trial at the first point of the search. Its choices stay.
    """
    study = setup.study
    if study.trials < 2:
        return []
    next_params: dict[str, Any] = {}
    for key, value in setup.sample(1).items():
        is_choice = isinstance(study.space[key], Choices)
        next_params[key] = trial.params[key] if is_choice else value
    hashes = []
    for each in (trial, replace(trial, point=1, params=next_params)):
        try:
            hashes.append(_read(setup, each, with_training=False))
        except Exception:  # some data need a running trainer; their class may raise anything
            return []
    if hashes[0] == hashes[1]:
        return []
    return [
        "two points of the search validate on different data: K* may come from an easy split. "
        "Split with a generator of a fixed seed, torch.Generator().manual_seed(0)"
    ]


def _hashes_of(setup: StudySetup, trial: Trial) -> list[str]:
    try:
        with one_thread():
            first = _read(setup, trial)
            is_digest = len(first) < 3
            if is_digest or first == _read(setup, trial):
                return first
    except Exception:  # some data need a running trainer; their class may raise anything
        pass
    return UNKNOWN


def _read(setup: StudySetup, trial: Trial, with_training: bool = True) -> list[str]:
    with (
        setup.workload.without_side_effects() as workload,
        preserve_rng_state(seed=trial.seed_for("order")),
    ):
        built = workload.build(trial)
        data = built.data
        attach_trainer(setup, built)
        data.prepare_data()
        data.setup("fit")
        digest = getattr(data, "digest", None)
        if digest is not None or type(data).__module__.startswith("lit_dps."):
            return [_short_digest(str(digest))]
        hasher = Hasher()
        parts = [data.train_dataloader()] if with_training else []
        for loaders in [*parts, data.val_dataloader()]:
            for loader in _each(loaders):
                _add_loader(hasher, loader, trial.cell.batch_size)
        return hasher.hashes


def _short_digest(digest: str) -> str:
    """Return a text that identifies a digest: its first digits, or a hash of a longer text.

    Texts such as "corpus-2026-11-29 v1" may begin alike.
    """
    is_hash = re.fullmatch("[0-9a-fA-F]*", digest) and len(digest) in HASH_LENGTHS
    if is_hash or len(digest) <= LENGTH:
        return digest[:LENGTH]
    return hashlib.sha256(digest.encode()).hexdigest()[:LENGTH]


def attach_trainer(setup: StudySetup, built: Built) -> None:
    """Give the data module of a trial a trainer that does not run, because `setup` may read it."""
    trainer = Trainer(**built.trainer)
    lightning_private.set_max_steps(trainer, setup.shown_steps or setup.goal.max_steps)
    built.data.trainer = trainer
    trainer.strategy.connect(built.module)


def fingerprint(value: Any) -> str:
    """Return an exact hash of the numbers, texts and arrays in a nested value, such as a batch."""
    hasher = Hasher()
    hasher.add(value)
    return " ".join(hasher.hashes[:2])


class Hasher:
    """Hashes examples: whole numbers, texts and shapes in one hash, floats in another."""

    def __init__(self):
        self._exact = hashlib.sha256()
        self._floats = hashlib.sha256()

    @property
    def hashes(self) -> list[str]:
        """Hashes of exact values, of floats, and of the versions and processor that round
        floats."""
        context = f"{torch.__version__} {np.__version__} {cpu_model()}"
        hashers = self._exact, self._floats, hashlib.sha256(context.encode())
        return [hasher.hexdigest()[:LENGTH] for hasher in hashers]

    def add(self, value: Any, depth: int = DEPTH) -> None:
        """Add an example, a batch or a part of a batch.

        Of an object of an unknown class, the name of the class and the attributes are hashed.
        """
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            self._add_array(value)
        elif isinstance(value, float):
            self._floats.update(repr(value).encode())
        elif isinstance(value, str) and os.sep in value and os.path.exists(value):
            pass  # a path, which may differ between machines
        elif value is None or isinstance(value, (bool, int, str, bytes)):
            self._exact.update(repr(value).encode())
        elif hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow
            self._exact.update(repr(value.size).encode() + value.tobytes())
        elif depth:
            self._add_nested(value, depth - 1)

    def _add_nested(self, value: Any, depth: int) -> None:
        self._exact.update(type(value).__name__.encode())
        if isinstance(value, Mapping):
            parts: list[Any] = []
            for key in sorted(value, key=str):
                parts += [str(key), value[key]]
        elif isinstance(value, (list, tuple)):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values())
        for part in parts:
            self.add(part, depth)

    def add_tensors(self, dataset: Any) -> None:
        """Add all tensors and arrays that a data set has as attributes."""
        for value in vars(dataset).values():
            is_short_list = isinstance(value, (list, tuple)) and len(value) <= EXAMPLES
            for part in value if is_short_list else [value]:
                if isinstance(part, (Tensor, np.ndarray)):
                    self._add_array(part)
        if isinstance(dataset, Subset):
            self._add_array(np.asarray(dataset.indices))
            self.add_tensors(dataset.dataset)

    def _add_array(self, value: Tensor | np.ndarray | np.generic) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu().to_dense()
            if value.dtype == torch.bfloat16:
                value = value.float()  # NumPy has no bfloat16
            value = value.numpy()
        value = np.asarray(value)
        self._exact.update(f"{value.dtype} {value.shape}".encode())
        if value.nbytes > MAX_BYTES:
            value = value[:: math.ceil(value.nbytes / MAX_BYTES)]
        if value.dtype == object:
            self.add(value.tolist(), depth=1)
        elif value.dtype.kind in "fc":
            self._floats.update(np.ascontiguousarray(value).tobytes())
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
    hasher.add(batch_size)  # the examples of a stream may depend on the batch size
    for batch in islice(loader, BATCHES):
        hasher.add(batch)


def _add_dataset(hasher: Hasher, dataset: Any) -> None:
    size = len(dataset)
    hasher.add(size)
    hasher.add_tensors(dataset)
    for index in np.linspace(0, size - 1, min(size, EXAMPLES)).astype(int).tolist():
        hasher.add(dataset[index])
