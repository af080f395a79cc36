"""Text for next-character prediction: a file, or scikit-learn's descriptions of its data sets."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from lit_dps.core.errors import ConfigError, DataError
from lit_dps.data.images import VALIDATION, ImageData, Images
from lit_dps.data.loaders import AuthorsOrder

TEST = 0.1  # share of the text, at its end, that is the test split


class Text(ImageData):
    """Adjacent windows of a text, each with its next characters. An example is a window.

    The last tenth of the text is the test split. A tenth of the windows before it, shuffled as
    images are, is the validation split. Characters are numbered in the order of their code points.
    A network needs their number, `vocabulary`.

    The default text is scikit-learn's descriptions of its data sets (BSD licence): 43,054
    characters of English prose, tables and references in scikit-learn 1.9.1, 92 different ones.
    Another release has another text. Studies of two texts are two studies, because their digests
    differ.

    Args:
        path: A text file in UTF-8; by default scikit-learn's descriptions.
        context: Characters of a window.
        batch_size, order, order_seed, eval_batch_size, train_examples: See `ImageData`, with
            windows as examples.

    Raises:
        DataError: if the file cannot be read.
        ConfigError: if the text has fewer windows than the splits take.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 32,
        batch_size: int = 128,
        order: str = "authors",
        order_seed: int = 0,
        eval_batch_size: int = 1000,
        train_examples: int | None = None,
    ):
        super().__init__(
            None, batch_size, order, order_seed, eval_batch_size, False, train_examples
        )
        self.path = path
        self.context = context

    def read(self) -> Images:
        return _windows(self.path, self.context)

    @property
    def vocabulary(self) -> int:
        """The number of different characters of the text."""
        largest = 0
        for windows in (*self.images.x.values(), *self.images.y.values()):
            largest = max(largest, int(windows.max()))
        return largest + 1


@lru_cache(maxsize=2)
def _windows(path: str | None, context: int) -> Images:
    """Return the windows of a text, and the next characters of each: int64, (n, context)."""
    if context < 1:
        raise ConfigError("data.context", context, "at least 1 character")
    text = descriptions() if path is None else _read(Path(path))
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = np.array([numbers[character] for character in text], dtype=np.int64)
    end = len(codes) - int(len(codes) * TEST)
    x, y = _cut(codes[:end], context)
    test = _cut(codes[end:], context)
    if int(len(x) * VALIDATION) < 1 or not len(test[0]):
        allowed = (
            f"shorter: {len(codes):,} characters must have at least 10 windows for training and "
            "validation, and one for the test split"
        )
        raise ConfigError("data.context", context, allowed)
    order = AuthorsOrder(len(x), VALIDATION)
    splits = {
        "train": (x[order.train_ids], y[order.train_ids]),
        "val": (x[order.val_ids], y[order.val_ids]),
        "test": test,
    }
    windows, following = {}, {}
    for name, (split_x, split_y) in splits.items():
        windows[name] = torch.from_numpy(np.ascontiguousarray(split_x))
        following[name] = torch.from_numpy(np.ascontiguousarray(split_y))
    return Images(windows, following, order, hashlib.sha256(text.encode()).hexdigest())


def _cut(codes: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of some characters, and the next characters of each window."""
    n = max(len(codes) - 1, 0) // context
    windows = codes[: n * context].reshape(n, context)
    following = codes[1 : n * context + 1].reshape(n, context)
    return windows, following


def descriptions() -> str:
    """Return scikit-learn's descriptions of its data sets, in the order of their names."""
    import sklearn

    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    texts = [_read(file) for file in sorted(folder.glob("*.rst"))]
    if not texts:
        raise DataError(
            f"scikit-learn has no descriptions of data sets in {folder}. Name a text file "
            "by data.path.",
            key="data.path",
        )
    return "".join(texts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.path: cannot read {file}: {error}", key="data.path", value=str(file)
        ) from None
