"""Text for next-character prediction: any file, or the descriptions of data sets that scikit-learn
ships."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from lit_dps.core.errors import ConfigError, DataError
from lit_dps.data.images import VALIDATION, ImageData, Images
from lit_dps.data.order import AuthorsOrder

TEST = 0.1  # share of the text, at its end, that is the test split


class Text(ImageData):
    """Windows of a text side by side, each with the characters that follow: examples are windows, B
    counts windows.

    The last tenth of the text is the test split; a tenth of the windows before it, shuffled as
    images are, the validation split. Characters are numbered by their code points, over the whole
    text. `vocabulary` says how many there are, which is what a network has to be told.

    Without a file it is what scikit-learn says of its data sets (BSD licence): 43,054 characters of
    English prose, tables and references in scikit-learn 1.9.1, 92 different ones. Another release
    has another text; studies of two texts are two studies, by their digest.

    Args:
        path: A text file in UTF-8; by default scikit-learn's descriptions.
        context: Characters of a window.
        batch_size, order, order_seed, eval_batch_size, train_examples: As of `ImageData`, in
            windows.

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
        self.path, self.context = path, context

    def read(self) -> Images:
        return _windows(self.path, self.context)

    @property
    def vocabulary(self) -> int:
        """Different characters of the text."""
        return int(max(x.max() for x in (*self.images.x.values(), *self.images.y.values()))) + 1


@lru_cache(maxsize=2)
def _windows(path: str | None, context: int) -> Images:
    """The windows (n, context) of a text and the characters that follow each, int64."""
    if context < 1:
        raise ConfigError("data.context", context, "at least 1 character")
    text = descriptions() if path is None else _read(Path(path))
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = np.array([numbers[character] for character in text], dtype=np.int64)
    end = len(codes) - int(len(codes) * TEST)
    (x, y), test = _cut(codes[:end], context), _cut(codes[end:], context)
    if int(len(x) * VALIDATION) < 1 or not len(test[0]):
        least = "10 windows of training and validation, and one of the test split"
        raise ConfigError(
            "data.context",
            context,
            f"shorter: of {len(codes):,} characters there have to be {least}",
        )
    order = AuthorsOrder(len(x), VALIDATION)
    picks = {
        "train": (x[order.train_ids], y[order.train_ids]),
        "val": (x[order.val_ids], y[order.val_ids]),
    }
    picks["test"] = test
    return Images(
        x={name: torch.from_numpy(np.ascontiguousarray(a)) for name, (a, _) in picks.items()},
        y={name: torch.from_numpy(np.ascontiguousarray(b)) for name, (_, b) in picks.items()},
        order=order,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def _cut(codes: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    n = max(len(codes) - 1, 0) // context
    return codes[: n * context].reshape(n, context), codes[1 : n * context + 1].reshape(n, context)


def descriptions() -> str:
    """What scikit-learn says of its data sets, one after another by name."""
    import sklearn

    folder = Path(sklearn.__file__).parent / "datasets" / "descr"
    texts = [_read(file) for file in sorted(folder.glob("*.rst"))]
    if not texts:
        raise DataError(
            f"scikit-learn has no descriptions of data sets in {folder}: name a file by data.path"
        )
    return "".join(texts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.path: cannot read {file}: {error}") from None
