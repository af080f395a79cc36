"""Hashes of data without a digest: an edit changes them, the batch size and the order of reading do
not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from lit_dps.core.attempt import Attempt
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.environment import DATA, UNKNOWN, changed_parts, is_same_data, versions_of
from lit_dps.core.trial import Cell
from lit_dps.data import Digits
from lit_dps.storage.header import StudyChanged
from lit_dps.storage.read import read_study
from lit_dps.study.data_hashes import data_hashes
from lit_dps.study.preflight.check import check_study
from lit_dps.study.retrain import retrain
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.fake_study import result, write_study
from tests.support.setups import setup_of
from tests.unit.engines.test_engine import quiet  # noqa: F401

FILE = None  # of the arrays: a test sets it


class Saved(LightningDataModule):
    """Reads a file."""

    def __init__(self, batch_size: int = 8, noise: float = 0.0):
        super().__init__()
        self.batch_size, self.noise = batch_size, noise

    def setup(self, stage=None):
        arrays = np.load(FILE)
        x = torch.tensor(arrays["x"])
        x = x + self.noise * torch.randn(x.shape)
        both = TensorDataset(x, torch.tensor(arrays["y"]))
        self.train, self.val = random_split(both, [400, 100])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 50)


class Augmented(Dataset):
    def __len__(self):
        return 500

    def __getitem__(self, i):
        with np.load(FILE) as arrays:
            return {
                "image": arrays["x"][i] * np.random.uniform(0.9, 1.1),
                "name": f"/tmp/{i}.png",
            }, int(arrays["y"][i])


class Lazy(Saved):
    def setup(self, stage=None):
        self.train = self.val = Augmented()


class Texts(Dataset):
    """Sentences with a slash, and the path of a file, which is another one on another machine."""

    def __len__(self):
        return 500

    def __getitem__(self, i):
        with np.load(FILE) as arrays:
            return f"red and/or {'green' if arrays['y'][i] else 'blue'}", str(FILE)


class Sentences(Saved):
    def setup(self, stage=None):
        self.train = self.val = Texts()


class Stream(IterableDataset):
    def __iter__(self):
        arrays = np.load(FILE)
        yield from zip(arrays["x"], arrays["y"], strict=True)


class Streamed(Saved):
    def setup(self, stage=None):
        self.train = self.val = Stream()

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size)


class Digested(Saved):
    """Knows its digest after `setup`, where it asks its trainer."""

    def setup(self, stage=None):
        super().setup(stage)
        self.digest = f"noise {self.noise}, {self.trainer.max_steps} steps"


class Missing(Saved):
    """Would know its digest after `setup`, which reads a file that was moved."""

    def setup(self, stage=None):
        raise FileNotFoundError("corpus.txt was moved")


class Known(Missing):
    """Has its digest before `setup`, which fails in the same way."""

    digest = "corpus v2"


class Named(Saved):
    """Has a text of its class as digest."""

    digest = ""

    def setup(self, stage=None):
        pass


class Drawn(Saved):
    """Draws from elsewhere than the point's seed."""

    def setup(self, stage=None):
        x = torch.tensor(np.random.default_rng().normal(size=(100, 3)))
        self.train = self.val = TensorDataset(x, torch.zeros(100).long())


def write(tmp_path, edit=lambda x, y: None) -> None:
    global FILE
    random = np.random.default_rng(0)
    x, y = random.normal(size=(500, 3)).astype("float32"), random.integers(0, 2, 500)
    edit(x, y)
    FILE = tmp_path / "data.npz"
    np.savez(FILE, x=x, y=y)


def study_of(kind: str, sizes=(8, 16), grid=None, space=None) -> StudySetup:
    space = {"model.lr": {"low": 0.1, "high": 1.0}, **(space or {})}
    study = StudyConfig(batch_sizes=list(sizes), grid=grid or {}, space=space)
    model = {"class_path": "tests.zoo.animals.models.Net", "init_args": {}}
    data = {"class_path": f"tests.unit.study.test_data_hashes.{kind}", "init_args": {}}
    workload = Workload(model, data, {"accelerator": "cpu"})
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 20}
    return setup_of(study, StorageConfig(), workload, goal)


def hashes(kind: str, sizes=(8, 16), grid=None) -> dict[str, list[str]]:
    return data_hashes(study_of(kind, sizes, grid))


def one_label(x, y):
    y[37] ^= 1


def all_labels(x, y):
    y ^= 1


def one_value(x, y):
    x[411] += 1e-3


def all_values(x, y):
    x *= 2


@pytest.mark.parametrize(
    ("kind", "edits"),
    [
        ("Saved", (one_label, one_value, all_values)),
        ("Lazy", (all_values,)),
        ("Streamed", (all_values,)),
        ("Sentences", (all_labels,)),
    ],
)
def test_an_edited_file_is_other_data(kind, edits, tmp_path):
    write(tmp_path)
    was = {DATA: hashes(kind)}
    assert list(was[DATA]) == [""] and was[DATA][""] != UNKNOWN
    assert {DATA: hashes(kind)} == was, "the same data are equal"
    for edit in edits:
        write(tmp_path, edit)
        assert changed_parts([was], {DATA: hashes(kind)}, DATA) == [""], edit.__name__


@pytest.mark.parametrize("kind", ["Saved", "Lazy"])
def test_another_grid_of_batch_sizes_has_the_same_data(kind, tmp_path):
    write(tmp_path)
    assert hashes(kind, (8, 16)) == hashes(kind, (4, 8, 16))


def test_each_value_of_an_axis_of_the_data_has_its_own_hashes(tmp_path):
    write(tmp_path)
    two, three = (
        hashes("Saved", grid={"data.noise": values}) for values in ([0.0, 0.5], [0.0, 0.5, 2.0])
    )
    assert two == {key: three[key] for key in ("noise=0.0", "noise=0.5")} and len(three) == 3
    assert two["noise=0.0"] != two["noise=0.5"]
    assert changed_parts([{DATA: two}], {DATA: three}, DATA) == []


def test_each_choice_of_the_data_has_its_own_hashes(tmp_path):
    """A study of an earlier version has the hashes of the first sample alone."""
    write(tmp_path)
    space = {
        "data.noise": {"choices": [0.0, 0.5]},
        "model.width": {"choices": [8, 16]},
    }
    study = study_of("Saved", space=space)
    both = data_hashes(study)
    first = study.sample(0)["data.noise"]
    (other,) = {0.0, 0.5} - {first}
    assert list(both) == ["", f"noise={other}"]
    for name, noise in (("", first), (f"noise={other}", other)):
        assert [both[name]] == [*hashes("Saved", grid={"data.noise": [noise]}).values()]
    changed = {**both, f"noise={other}": ["1", "2", "3"]}
    assert changed_parts([{DATA: both}], {DATA: changed}, DATA) == [f"noise={other}"]
    assert changed_parts([{DATA: {"": both[""]}}], {DATA: changed}, DATA) == []


def test_another_text_of_the_users_digest_is_other_data():
    stored, now = ["v1:noise", "a", "here"], ["v2:noise", "a", "here"]
    environments = [{DATA: {"noise=0.5": stored}}, {DATA: {"noise=0.5": now}}]
    assert changed_parts(environments[:1], environments[1], DATA) == ["noise=0.5"]
    assert len(versions_of(environments, DATA, "noise=0.5")) == 2


@pytest.mark.parametrize(
    ("digest", "other"),
    [("corpus-2026-11-29 v1", "corpus-2026-11-29 v2"), ("0" * 20 + "1", "0" * 20 + "2")],
)
def test_texts_that_begin_alike_are_other_data(monkeypatch, digest, other):
    monkeypatch.setattr(Named, "digest", digest)
    stored = {DATA: hashes("Named")}
    monkeypatch.setattr(Named, "digest", other)
    assert changed_parts([stored], {DATA: hashes("Named")}, DATA) == [""]


@pytest.mark.parametrize("digest", ["v1", "7", "0123456789abcdef" * 4, "0123456789ABCDEF" * 2])
def test_digests_are_stored_as_in_earlier_versions(monkeypatch, digest):
    monkeypatch.setattr(Named, "digest", digest)
    assert hashes("Named") == {"": [digest[:16]]}


def test_data_that_differ_each_time_are_unknown(tmp_path):
    assert hashes("Drawn") == {"": UNKNOWN}
    assert changed_parts([{DATA: {"": ["1", "2", "3"]}}], {DATA: {"": UNKNOWN}}, DATA) == []


def test_floats_of_another_machine_are_not_compared():
    assert is_same_data(["a", "b", "here"], ["a", "c", "there"])
    assert not is_same_data(["a", "b", "here"], ["a", "c", "here"])
    assert not is_same_data(["a", "b", "here"], ["x", "b", "there"]), (
        "whole numbers are, on any machine"
    )


def test_our_own_data_give_their_digest():
    model = {"class_path": "tests.zoo.animals.models.Net", "init_args": {}}
    workload = Workload(
        model, {"class_path": "lit_dps.data.Digits", "init_args": {}}, {"accelerator": "cpu"}
    )
    study = StudyConfig(batch_sizes=[8], space={"model.lr": {"low": 0.1, "high": 1.0}})
    data = Digits(batch_size=8)
    data.setup()
    assert data_hashes(setup_of(study, StorageConfig(), workload, {}, {}, {})) == {
        "": [data.digest[:16]]
    }


def finished_study(folder, kind: str, digest: str | None) -> StudySetup:
    """Store a study of one cell and one trial, whose data had this digest."""
    study = study_of(kind, space={"data.noise": {"low": 0.0, "high": 1.0}})
    study = study.with_study(trials=1, sparsities=[0.0], batch_sizes=[8], name="fake")
    study = replace(study, storage=StorageConfig(folder=str(folder)))
    cell = Cell(8, 0.0)
    write_study(
        study.storage.optuna_url,
        {cell: [result(cell, 0, 8, params=study.sample(0))]},
        space=study.study.space,
        goal=study.built_goal,
        identity={**study.identity(None), "data_digest": digest},
        config=study.config(),
    )
    return study


def test_a_finished_study_has_the_digest_of_the_dry_run(tmp_path):
    """Its data are set up without a dry run, at the first point of the search."""
    write(tmp_path)
    point = study_of("Digested", space={"data.noise": {"low": 0.0, "high": 1.0}}).sample(0)
    digest = f"noise {point['data.noise']}, 20 steps"
    checked = check_study(finished_study(tmp_path, "Digested", digest))
    assert not checked.trials_remain
    assert checked.data.digest == digest


def retrain_first(study: StudySetup) -> Attempt:
    record = read_study(study.storage.optuna_url, "fake")
    return retrain(study, record, record.results[record.cells[0]][0])


@pytest.mark.parametrize("check", [check_study, retrain_first])
def test_a_refusal_of_data_that_cannot_be_set_up_names_the_cause(tmp_path, check):
    study = finished_study(tmp_path, "Missing", "corpus v1")
    with pytest.raises(StudyChanged) as refused:
        check(study)
    assert refused.value.keys == ("data_digest",)
    assert isinstance(refused.value.__cause__, FileNotFoundError)
    assert str(refused.value).startswith(
        "the data could not be set up: FileNotFoundError: corpus.txt was moved (test_data_hashes.py"
    )
    assert "another configuration" not in str(refused.value)


@pytest.mark.parametrize("check", [check_study, retrain_first])
def test_a_refusal_names_a_digest_that_is_known_without_setup(tmp_path, check):
    study = finished_study(tmp_path, "Known", "corpus v1")
    with pytest.raises(StudyChanged) as refused:
        check(study)
    assert "data_digest was 'corpus v1' and is 'corpus v2'" in str(refused.value)
    assert "set up" not in str(refused.value)


def test_data_without_a_digest_may_need_a_running_trainer(tmp_path):
    checked = check_study(finished_study(tmp_path, "Missing", None))
    assert not checked.trials_remain


def test_the_folder_of_the_data_is_no_part_of_it(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    write(tmp_path / "here")
    first = hashes("Sentences")
    write(tmp_path / "there")
    assert hashes("Sentences") == first
