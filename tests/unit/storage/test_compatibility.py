"""What joins the trials of a study is told apart from what is there, or refused before anything is
changed."""

from __future__ import annotations

import dataclasses

import optuna
import pytest
from lightning.pytorch import LightningDataModule

from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.data.quadratic import GradientNoise
from lit_dps.report.publish import figures_folder
from lit_dps.storage.cells import WrongCell, open_cell
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import StudyChanged, check_unchanged, declare
from lit_dps.storage.stored_format import study_attributes
from tests.unit.storage.test_merge import merged
from tests.unit.study.test_grid import setup

NETWORK = "model.network"
STUDY = StudyConfig(
    name="s",
    batch_sizes=[4],
    sparsities=[0.9],
    trials=1,
    space={"model.lr": Range(0.1, 1.0)},
    grid={NETWORK: ["a.Net"]},
)


def url_of(folder, name: str, study: StudyConfig) -> str:
    url = f"sqlite:///{folder}/{name}.db"
    declare(url, study, "w", Goal(0.1), {"a": 1}, {})
    return url


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"grid": {NETWORK: ["b.Net"]}}, f"study.grid.{NETWORK}", "b.Net"),
        ({"sparsities": [0.9000000001]}, "study.sparsities", 0.9000000001),
        ({"grid": {}}, "study.grid", []),
    ],
    ids=["class", "sparsity", "no axis"],
)
def test_cells_of_the_same_name_are_refused(tmp_path, change, key, value):
    url, other = url_of(tmp_path, "one", STUDY), dataclasses.replace(STUDY, **change)
    before = study_attributes(open_storage(url), "s")
    for refused in (
        lambda: check_unchanged(url, "s", {"a": 1}, other),
        lambda: declare(url, other, "w", Goal(0.1), {"a": 1}, {}),
        lambda: merged(url, url_of(tmp_path, "two", other)),
        lambda: merged(f"sqlite:///{tmp_path}/new.db", url, f"sqlite:///{tmp_path}/two.db"),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert (caught.value.key, caught.value.value) == (key, value)
    assert study_attributes(open_storage(url), "s") == before and not optuna.get_all_study_names(
        f"sqlite:///{tmp_path}/new.db"
    )


def test_a_new_study_whose_files_would_take_the_place_of_anothers_is_refused(tmp_path):
    def named(name: str) -> StudyConfig:
        return dataclasses.replace(STUDY, name=name)

    url = url_of(tmp_path, "study", named("a b"))
    for name in ("a_b", "a:b"):
        for refused in (
            lambda name=name: check_unchanged(url, name, {"a": 1}),
            lambda name=name: declare(url, named(name), "w", Goal(0.1), {"a": 1}, {}),
        ):
            with pytest.raises(ConfigError) as caught:
                refused()
            assert (caught.value.key, caught.value.value) == ("study.name", name)
        assert study_attributes(open_storage(url), name) == {}
    for name in ("a-b", "a_b_", "a b"):  # the last goes on
        check_unchanged(url, name, {"a": 1})
        declare(url, named(name), "w", Goal(0.1), {"a": 1}, {})
    assert figures_folder("x", "a b") == figures_folder("x", "a_b"), (
        "stored studies find their files where they were"
    )


class Rooted(LightningDataModule):
    """Somebody else's data, of which nothing is read."""


def test_data_without_a_digest_are_known_by_their_arguments(tmp_path):
    def identity(data=None, **arguments):
        found = setup({})
        spec = {
            "class_path": "tests.unit.storage.test_compatibility.Rooted",
            "init_args": {"num_workers": 2, **arguments},
        }
        return dataclasses.replace(
            found, workload=dataclasses.replace(found.workload, data=spec)
        ).identity(data)

    one, other = (identity(Rooted(), root=root, eval_batch_size=8) for root in ("easy", "hard"))
    assert one["unread_data"] == {"root": "easy", "eval_batch_size": 8}
    of_before = {key: value for key, value in one.items() if key != "unread_data"}
    assert of_before == identity(root="easy") and "unread_data" not in identity(Rooted())
    assert "unread_data" not in identity(GradientNoise(), eval_batch_size=8), (
        "our own say all that decides them"
    )

    url = f"sqlite:///{tmp_path}/s.db"
    for known in (
        of_before,
        one,
        of_before,
    ):  # a study of an earlier version goes on, and then knows
        declare(url, STUDY, "w", Goal(0.1), known, {})
    declare(url, STUDY, "w", Goal(0.1), one, {})
    with pytest.raises(StudyChanged) as caught:
        check_unchanged(url, "s", other)
    assert caught.value.keys == ("unread_data.root",)
    declare(f"sqlite:///{tmp_path}/t.db", STUDY, "w", Goal(0.1), other, {})
    with pytest.raises(StudyChanged) as caught:
        merged(url, f"sqlite:///{tmp_path}/t.db")
    assert caught.value.keys == ("unread_data.root",)


def test_a_cell_is_not_opened_for_another_one(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    for first, second in (
        (Cell(4, 0.9999991), Cell(4, 0.9999992)),
        (Cell(4, 0.0, ((NETWORK, "a.Net"),)), Cell(4, 0.0, ((NETWORK, "b.Net"),))),
    ):
        study = open_cell(storage, "s", first, "uid")
        before = dict(study.user_attrs)
        with pytest.raises(WrongCell) as caught:
            open_cell(storage, "s", second, "uid")
        assert caught.value.keys == (("axes",) if second.axes else ("sparsity",))
        assert study.user_attrs == before
        assert open_cell(storage, "s", first, "uid").user_attrs == before
