"""scikit-learn's handwritten digits, for quick work without a download."""

from __future__ import annotations

import torch

from lit_dps.data.images import ImageData, Images, prepare

TRAINING_FILE = 1500


class Digits(ImageData):
    """The 1,797 digits that scikit-learn ships (UCI "Optical Recognition of Handwritten Digits",
    its test set).

    The first 1,500 stand for the training file (1,350 training and 150 validation examples), the
    last 297 for the test file. The 8 x 8 images are resized bilinearly to (1, 28, 28), so that the
    paper's Simple-CNN runs on them.
    """

    def load(self) -> Images:
        from sklearn.datasets import load_digits

        digits = load_digits()
        small = torch.from_numpy(digits.images).float()[:, None]
        large = torch.nn.functional.interpolate(
            small, size=(28, 28), mode="bilinear", align_corners=False
        )
        x, y = large.permute(0, 2, 3, 1).numpy(), digits.target.astype("int64")
        return prepare(
            (x[:TRAINING_FILE], y[:TRAINING_FILE]), (x[TRAINING_FILE:], y[TRAINING_FILE:])
        )
