"""Reading data sets from disk: what is accepted, what is refused, and what the message says."""

import gzip

import numpy as np
import pytest
import torchvision

from lit_dps.core.errors import DataError
from lit_dps.data import CIFAR10, MNIST
from lit_dps.data.files import data_root, read_idx, read_images, read_parquet
from tests.support.errors import refuses
from tests.support.tiny import gray, idx, png, write_idx, write_parquet

FILES = MNIST.files
TRAIN, TEST = gray(20, 0), gray(7, 1)


def never(*args, **kwargs):
    raise AssertionError("nothing may be downloaded here")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("MNIST", "FashionMNIST", "CIFAR10"):
        monkeypatch.setattr(torchvision.datasets, name, never)


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_are_read_plain_and_zipped(tmp_path, gz):
    write_idx(tmp_path / "MNIST/raw", TRAIN, TEST, gz)
    for train, (x, y) in ((True, TRAIN), (False, TEST)):
        images, labels = read_images(FILES, tmp_path, train, download=False)
        np.testing.assert_array_equal(images, x[..., None])
        np.testing.assert_array_equal(labels, y)
        assert labels.dtype == np.int64 and images.dtype == np.uint8


def test_the_header_is_big_endian(tmp_path):
    """Written out by hand: 2 images of 1 x 3."""
    path = tmp_path / "x"
    path.write_bytes(
        bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3, 10, 11, 12, 13, 14, 255])
    )
    np.testing.assert_array_equal(read_idx(path, 3), [[[10, 11, 12]], [[13, 14, 255]]])


GOOD = idx(TRAIN[0])


@pytest.mark.parametrize(
    ("data", "data_bytes"),
    [
        (GOOD[:-1], 15679),
        (GOOD + b"\0", 15681),
        (GOOD[:10], None),
        (b"", None),
        (
            b"\0\0\x0d\x03" + GOOD[4:],
            None,
        ),  # floats
        (idx(TRAIN[1]), None),  # a labels file
        (b"<html>404</html>" * 99, None),
    ],
    ids=["short", "long", "header", "empty", "type", "labels", "html"],
)
@pytest.mark.parametrize("gz", [False, True])
def test_a_damaged_idx_file_is_refused(tmp_path, data, data_bytes, gz):
    path = tmp_path / ("images.gz" if gz else "images")
    path.write_bytes(gzip.compress(data) if gz else data)
    with refuses(str(path), data_bytes, DataError):
        read_idx(path, 3)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b[:5], lambda b: b + b"more", lambda b: GOOD]
)
def test_a_damaged_gz_file_is_refused(tmp_path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(GOOD)))
    with refuses(str(path), error=DataError):
        read_idx(path, 3)


def test_a_flipped_byte_within_a_gz_file_is_refused(tmp_path):
    path, data = tmp_path / "images.gz", bytearray(gzip.compress(GOOD))
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with refuses(str(path), error=DataError):
        read_idx(path, 3)


def test_images_and_labels_of_different_counts_are_refused(tmp_path):
    write_idx(tmp_path / "MNIST/raw", (TRAIN[0], TRAIN[1][:-1]), TEST)
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    with refuses(str(images), (20, 19), error=DataError):
        read_images(FILES, tmp_path, True, download=False)


def test_empty_files_are_refused(tmp_path):
    write_idx(tmp_path / "MNIST/raw", (TRAIN[0][:0], TRAIN[1][:0]), TEST)
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    with refuses(str(images), (0, 0), error=DataError):
        read_images(FILES, tmp_path, True, download=False)


def test_a_missing_labels_file_is_named(tmp_path):
    write_idx(tmp_path / "MNIST/raw", TRAIN, TEST)
    (tmp_path / "MNIST/raw/train-labels-idx1-ubyte").unlink()
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    with refuses(str(images), error=DataError):
        read_images(FILES, tmp_path, True, download=False)


@pytest.mark.parametrize("column", ["img", "image"])
@pytest.mark.parametrize("colour", [False, True])
def test_parquet_is_read_with_either_column_name(tmp_path, column, colour):
    x = np.random.default_rng(0).integers(
        0, 256, (5, 6, 4, 3) if colour else (5, 6, 4), dtype=np.uint8
    )
    write_parquet(tmp_path / "train.parquet", x, [3, 1, 4, 1, 5], column)
    images, labels = read_parquet(tmp_path / "train.parquet")
    np.testing.assert_array_equal(images, x if colour else x[..., None])
    assert labels.tolist() == [3, 1, 4, 1, 5] and labels.dtype == np.int64


SMALL = TRAIN[0][:2, :8, :8]


def broken_chunk(image: np.ndarray) -> bytes:
    """A PNG whose data chunk claims to be shorter: Pillow meets the rest while it decodes, with a
    SyntaxError."""
    data = bytearray(png(image))
    data[data.index(b"IDAT") - 1] -= 20
    return bytes(data)


@pytest.mark.parametrize(
    ("images", "labels", "column", "label", "says"),
    [
        (SMALL, [0, 1], "picture", "label", "no column img or image"),
        (SMALL, [0, 1], "img", "fine_label", "label"),
        (SMALL, [0, None], "img", "label", "label"),  # would be -2^63
        (SMALL, ["a", "b"], "img", "label", ""),
        ([png(SMALL[0]), png(SMALL[1][:4])], [0, 1], "img", "label", "same shape"),
        ([png(SMALL[0]), b"no image"], [0, 1], "img", "label", "cannot identify image file"),
        ([png(SMALL[0]), png(SMALL[1])[:60]], [0, 1], "img", "label", ""),
        ([png(SMALL[0]), broken_chunk(SMALL[1])], [0, 1], "img", "label", ""),
        (SMALL[:0], [], "img", "label", ""),
    ],
    ids=["column", "label", "null", "text", "shapes", "bytes", "cut", "chunk", "empty"],
)
def test_a_parquet_file_that_is_no_image_set_is_refused(
    tmp_path, images, labels, column, label, says
):
    path = tmp_path / "train.parquet"
    write_parquet(path, images, labels, column, label)
    with pytest.raises(DataError) as caught:
        read_parquet(path)
    assert str(caught.value).startswith(f"cannot read {path}: ") and says in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 200, -1], ids=["empty", "magic", "cut", "byte"])
def test_a_truncated_parquet_file_is_refused(tmp_path, keep):
    path = tmp_path / "train.parquet"
    write_parquet(path, SMALL, [0, 1])
    path.write_bytes(path.read_bytes()[:keep])
    with refuses(str(path), error=DataError):
        read_parquet(path)


def test_idx_goes_before_parquet(tmp_path):
    write_idx(tmp_path / "MNIST/raw", TRAIN, TEST)
    write_parquet(tmp_path / "mnist/train.parquet", TEST[0], TEST[1])
    assert len(read_images(FILES, tmp_path, True, download=False)[0]) == 20


def test_parquet_below_the_root_is_found(tmp_path):
    write_parquet(tmp_path / "mnist/test.parquet", TEST[0], TEST[1])
    images, labels = read_images(FILES, tmp_path, False, download=False)
    np.testing.assert_array_equal(images[..., 0], TEST[0])
    np.testing.assert_array_equal(labels, TEST[1])


def test_missing_data_without_download_says_where_it_looked_and_what_to_do(tmp_path):
    root = tmp_path / "data"
    with pytest.raises(DataError) as caught:
        read_images(FILES, root, True, download=False)
    message = str(caught.value)
    for place in (
        f"{root}/MNIST/raw/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte[.gz]",
        f"{root}/mnist/{{train,test}}.parquet",
        "data.download",
        "--data.root",
        "LIT_DPS_DATA",
    ):
        assert place in message
    with pytest.raises(DataError) as caught:
        read_images(CIFAR10.files, root, True, download=False)
    for place in (f"{root}/cifar-10-batches-py", f"{root}/cifar10/{{train,test}}.parquet"):
        assert place in str(caught.value)
    assert not root.exists()


def test_the_root_is_the_argument_else_the_variable_else_data(monkeypatch, tmp_path):
    monkeypatch.setenv("LIT_DPS_DATA", str(tmp_path))
    assert data_root("elsewhere").name == "elsewhere"
    assert data_root(None) == tmp_path
    monkeypatch.setenv("LIT_DPS_DATA", "")
    assert str(data_root(None)) == "data"
    monkeypatch.delenv("LIT_DPS_DATA")
    assert str(data_root(None)) == "data"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root("~/sets") == tmp_path / "sets"
