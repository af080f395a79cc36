"""scikit-learn's digits, enlarged: sizes, split and the resampling written out by hand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from lit_dps.data import Digits


@pytest.fixture(scope="module")
def data():
    digits = Digits()
    digits.setup()
    return digits


def test_sizes_and_shapes(data):
    assert {name: tuple(x.shape) for name, x in data.images.x.items()} == {
        "train": (1350, 1, 28, 28),
        "val": (150, 1, 28, 28),
        "test": (297, 1, 28, 28),
    }
    assert {x.dtype for x in data.images.x.values()} == {torch.float32}
    assert sorted(set(data.images.y["val"].tolist())) == list(range(10))


def bilinear(image: np.ndarray, size: int) -> np.ndarray:
    """Pixel centres at (i + 1/2) n / size - 1/2, clipped at the edge: a weight matrix from both
    sides."""
    n = len(image)
    matrix = np.zeros((size, n))
    for i in range(size):
        at = max((i + 0.5) * n / size - 0.5, 0)
        low = int(at)
        matrix[i, low] += 1 - (at - low)
        matrix[i, min(low + 1, n - 1)] += at - low
    return matrix @ image @ matrix.T


def test_images_are_resized_bilinearly_split_as_the_authors_do_and_normalized_by_the_training_file(
    data,
):
    raw = load_digits()
    large = np.stack([bilinear(image, 28) for image in raw.images])
    mean, std = large[:1500].mean(), large[:1500].std()
    ids = np.arange(1500)
    np.random.RandomState(0).shuffle(ids)
    for name, rows in (("val", ids[:150]), ("train", ids[150:]), ("test", np.arange(1500, 1797))):
        np.testing.assert_array_equal(data.images.y[name], raw.target[rows])
        # torch computes positions up to 8 in float32 (2e-7 off); the gray values change by up to 16
        # a pixel: 4e-6
        np.testing.assert_allclose(
            data.images.x[name][:, 0].numpy(), (large[rows] - mean) / std, rtol=0, atol=4e-6
        )
