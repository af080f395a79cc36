"""scikit-learn's handwritten digits, for quick work without a download."""

from __future__ import annotations

from typing import Any

import torch

from lit_dps.data.images import ImageData, Images, prepare

TRAINING_FILE = 1500


class Digits(ImageData):
    """The 1,797 handwritten digits of scikit-learn.

    They are the test set of UCI's "Optical Recognition of Handwritten Digits". The first 1,500
    images are the training file (1,350 training and 150 validation examples), the last 297 the test
    file. The 8 x 8 images are resized bilinearly to (1, 28, 28) for the paper's Simple-CNN.
    """

    def load(self) -> Images:
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        small = torch.from_numpy(digits.images).float()[:, None]
        large = torch.nn.functional.interpolate(
            small, size=(28, 28), mode="bilinear", align_corners=False
        )
        x = large.permute(0, 2, 3, 1).numpy()
        y = digits.target.astype("int64")
        train = (x[:TRAINING_FILE], y[:TRAINING_FILE])
        return prepare(train, (x[TRAINING_FILE:], y[TRAINING_FILE:]))
