"""Downloading by torchvision, which is replaced here: what is asked of it, and what a failure
leaves behind."""

from pathlib import Path

import numpy as np
import pytest
import torchvision

from lit_dps.core.errors import DataError
from lit_dps.data import CIFAR10, MNIST
from lit_dps.data.files import read_images
from tests.support.errors import refuses
from tests.support.tiny import gray, write_idx

TRAIN, TEST = gray(20, 0), gray(7, 1)


def failing(folder: str, error: Exception, leaves: str | None = None):
    """A torchvision data set that makes its folder, as they do, and then fails."""

    def download(root, train=True, download=False):
        assert download
        (Path(root) / folder).mkdir(parents=True, exist_ok=True)
        if leaves:
            (Path(root) / folder / leaves).write_bytes(b"half")
        raise error

    return download


def test_what_is_missing_is_downloaded_once_and_read(tmp_path, monkeypatch):
    calls = []

    def download(root, train=True, download=False):
        calls.append(download)
        write_idx(Path(root) / "MNIST/raw", TRAIN, TEST)

    monkeypatch.setattr(torchvision.datasets, "MNIST", download)
    for train, (x, _) in ((True, TRAIN), (False, TEST)):
        images, _ = read_images(MNIST.files, tmp_path / "data", train, download=True)
        np.testing.assert_array_equal(images[..., 0], x)
    assert calls == [True]


@pytest.mark.parametrize(
    ("data", "folder"), [(MNIST, "MNIST/raw"), (CIFAR10, "cifar-10-batches-py")]
)
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("no mirror\nat all"), "no mirror"),
        (OSError("timed out"), "timed out"),
        (OSError(), "OSError"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_no_folder(
    tmp_path, monkeypatch, data, folder, error, shown
):
    monkeypatch.setattr(torchvision.datasets, data.files.name, failing(folder, error))
    root = tmp_path / "new" / "data"
    with pytest.raises(DataError) as caught:
        read_images(data.files, root, True, download=True)
    message = str(caught.value)
    assert f"({shown})" in message and "\n" not in message
    assert f"{root}/{folder}" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_a_failed_download_leaves_the_users_own_empty_folder_alone(tmp_path, monkeypatch, folder):
    """A mount point or a folder just made for the data is not ours to remove, nor what lies above
    it."""
    monkeypatch.setattr(torchvision.datasets, "MNIST", failing("MNIST/raw", OSError("offline")))
    root = tmp_path / "mine" / "data"
    (root / folder).mkdir(parents=True)
    with refuses("data.root", error=DataError) as failed:
        read_images(MNIST.files, root, True, download=True)
    assert "offline" in str(failed.value)
    assert root.exists()


def test_a_failed_download_keeps_the_files_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torchvision.datasets, "MNIST", failing("MNIST/raw", OSError("offline"), leaves="half.gz")
    )
    with refuses("data.root", error=DataError) as failed:
        read_images(MNIST.files, tmp_path / "data", True, download=True)
    assert "offline" in str(failed.value)
    assert (tmp_path / "data/MNIST/raw/half.gz").read_bytes() == b"half"


def test_a_download_that_brings_nothing_does_not_go_on_for_ever(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torchvision.datasets, "MNIST", lambda root, download: calls.append(root))
    with refuses("data.root", str(tmp_path), error=DataError):
        read_images(MNIST.files, tmp_path, True, download=True)
    assert len(calls) == 1


def test_a_download_that_broke_off_between_its_files_is_taken_up_again(tmp_path, monkeypatch):
    """torchvision fetches images first; the next run must not stop at the labels that are
    missing."""
    raw = tmp_path / "MNIST/raw"
    write_idx(raw, TRAIN, TEST)
    (raw / "train-labels-idx1-ubyte").unlink()
    monkeypatch.setattr(
        torchvision.datasets, "MNIST", lambda root, download: write_idx(raw, TRAIN, TEST)
    )
    _, labels = read_images(MNIST.files, tmp_path, True, download=True)
    np.testing.assert_array_equal(labels, TRAIN[1])


def test_cifar_pickles_that_are_not_the_official_ones_are_refused_unopened(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (folder / name).write_bytes(
            b"cos\nsystem\n(S'exit 3'\ntR."
        )  # unpickled, it would run a command
    with refuses(str(folder), "data_batch_1", error=DataError):
        read_images(CIFAR10.files, tmp_path, True, download=False)
