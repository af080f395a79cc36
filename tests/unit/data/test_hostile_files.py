"""Files from outside that would run a command if they were unpickled."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys

import numpy as np
import pytest
import torch
import torchvision

from lit_dps.cli import main
from lit_dps.core.errors import DataError
from lit_dps.data.files import read_images
from lit_dps.data.images import CIFAR10
from lit_dps.data.pickles import read_pickle
from tests.e2e.commands import FAST
from tests.support.errors import refuses


class Bomb:
    """Unpickled, it makes a file of this name in the working folder."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "exploded").exists(), "the file was executed"


def test_the_bomb_explodes_where_it_is_opened_carelessly(folder):
    pickle.loads(pickle.dumps(Bomb()))
    (folder / "exploded").rmdir()


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    "hide", [lambda x: x, lambda x: {"data": 1, "labels": [x]}], ids=["bare", "within"]
)
def test_a_pickle_that_names_a_function_is_refused(folder, protocol, hide):
    (folder / "batch").write_bytes(pickle.dumps(hide(Bomb()), protocol))
    with refuses(str(folder / "batch"), error=DataError) as refused:
        read_pickle(folder / "batch")
    assert f"{os.mkdir.__module__}.mkdir" in str(refused.value)


@pytest.mark.parametrize("bad", [b"", b"\x80", b"nonsense", b"cnumpy\nload\n."])
def test_a_damaged_pickle_is_one_line(folder, bad):
    (folder / "batch").write_bytes(bad)
    with refuses(str(folder / "batch"), error=DataError) as refused:
        read_pickle(folder / "batch")
    assert "\n" not in str(refused.value)


def test_official_batches_are_read_as_torchvision_reads_them(folder, monkeypatch):
    rng, digests = np.random.default_rng(0), {}
    (folder / "cifar-10-batches-py").mkdir()
    for name in ("data_batch_1", "data_batch_2", "test_batch", "batches.meta"):
        batch = {
            "data": rng.integers(0, 256, (4, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, 4).tolist(),
        }
        written = pickle.dumps({"label_names": list("abcdefghij")} if "meta" in name else batch, 2)
        (folder / "cifar-10-batches-py" / name).write_bytes(written)
        digests[name] = hashlib.md5(written).hexdigest()
    official = torchvision.datasets.CIFAR10
    monkeypatch.setattr(
        official, "train_list", [[n, digests[n]] for n in ("data_batch_1", "data_batch_2")]
    )
    monkeypatch.setattr(official, "test_list", [["test_batch", digests["test_batch"]]])
    monkeypatch.setattr(official, "meta", {**official.meta, "md5": digests["batches.meta"]})
    for train in (True, False):
        x, y = read_images(CIFAR10.files, folder, train, download=False)
        theirs = official(folder, train=train)
        np.testing.assert_array_equal(x, theirs.data)
        np.testing.assert_array_equal(y, theirs.targets)
        assert x.dtype == np.uint8 and y.dtype == np.int64


@pytest.mark.parametrize("verb", ["fit", "validate", "test"])
def test_a_hostile_checkpoint_is_refused_in_one_line(folder, verb, monkeypatch, capfd):
    torch.save({"state_dict": {}, "hyper_parameters": {"x": Bomb()}}, folder / "bad.ckpt")
    monkeypatch.setattr(sys, "argv", ["lit-dps"])
    assert main([verb, "--config", str(FAST), "--ckpt_path", "bad.ckpt"]) == 2
    message = capfd.readouterr().err
    assert "bad.ckpt" in message and message.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["bad.ckpt"]


@pytest.mark.parametrize("content", [b"", b"nothing", None])
def test_a_damaged_or_missing_checkpoint_is_refused_in_one_line(
    folder, content, monkeypatch, capfd
):
    if content is not None:
        (folder / "bad.ckpt").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["lit-dps"])
    assert main(["validate", "--config", str(FAST), "--ckpt_path", "bad.ckpt"]) == 2
    said = capfd.readouterr().err
    assert "bad.ckpt" in said and said.count("\n") == 1
