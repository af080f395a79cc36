"""Optuna studies that lit_dps did not make are refused under every name of ours, and nothing is
written."""

from __future__ import annotations

import pickle
import shutil
import sqlite3

import optuna
import pytest

from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.header import check_unchanged, declare
from lit_dps.storage.merge import merge
from lit_dps.storage.ownership import ForeignStudy
from lit_dps.storage.read import open_elsewhere
from lit_dps.storage.schema import cell_study_name
from tests.support.errors import refuses
from tests.support.runs import trials_of
from tests.unit.storage.test_store import SPACE, ended
from tests.unit.storage.test_store_shared import declared, opened

IDENTITY = {"goal": {"error": 0.1}}
CONFIG = StudyConfig(name="s", space=SPACE, batch_sizes=[4], sparsities=[0.0], trials=3)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


def with_trials(study: optuna.Study) -> None:
    study.optimize(lambda trial: trial.suggest_float("lr", 1e-4, 0.1), n_trials=3)


def with_attribute(study: optuna.Study) -> None:
    study.set_user_attr("author", "Ada")


def with_our_words(study: optuna.Study) -> None:
    """Attributes of theirs that are called as some of ours."""
    study.set_user_attr("config", {"lr": 1})
    with_trials(study)


MADE = {"trials": with_trials, "an attribute": with_attribute, "our words": with_our_words}


def dump(url: str) -> list[str]:
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        return list(connection.iterdump())


@pytest.mark.parametrize("name", ["s", "s | B=4 S=0", "s | B=4 S=0 | repeats"])
@pytest.mark.parametrize("kind", MADE)
def test_a_foreign_study_is_refused_and_left_as_it_is(url, name, kind):
    if name != "s" and kind == "our words":
        pytest.skip("the same as trials")
    MADE[kind](optuna.create_study(study_name=name, storage=url))
    before = dump(url)
    for refuse in (
        lambda: check_unchanged(url, "s", IDENTITY, CONFIG),
        lambda: declare(url, CONFIG, "workload", Goal(0.1), IDENTITY, {}),
    ):
        with pytest.raises(ForeignStudy) as caught:
            refuse()
        assert caught.value.name == name
        assert "study.name" in str(caught.value)
    assert dump(url) == before
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_study_of_another_direction_is_foreign_also_without_trials(url):
    optuna.create_study(study_name="s", storage=url, direction="maximize")
    with pytest.raises(ForeignStudy):
        declared(url)


def test_foreign_trials_in_a_cell_of_ours_are_refused(url):
    uid = declared(url)
    store = opened(url, uid)
    store.store_result(ended(next(trials_of(store))))
    store.leave()
    with_trials(optuna.load_study(study_name="s | B=4 S=0", storage=url))
    with pytest.raises(ForeignStudy) as caught:
        declared(url)
    assert caught.value.name == cell_study_name("s", Cell(4))


def test_a_cell_that_became_foreign_since_is_refused_when_it_is_opened(url):
    uid = declared(url)
    with_trials(optuna.create_study(study_name="s | B=4 S=0", storage=url))
    with pytest.raises(ForeignStudy):
        next(trials_of(opened(url, uid)))


@pytest.mark.parametrize("name", ["s", "s | B=4 S=0"])
def test_nothing_is_merged_into_a_foreign_study(url, tmp_path, name):
    other = f"sqlite:///{tmp_path}/other.db"
    store = opened(other, declared(other))
    store.store_result(ended(next(trials_of(store))))
    with_trials(optuna.create_study(study_name=name, storage=url))
    before = dump(url)
    with open_elsewhere(other, url) as elsewhere, pytest.raises(ForeignStudy) as caught:
        merge(url, [elsewhere])
    assert caught.value.name == name
    assert dump(url) == before


def test_advice_is_not_kept_in_a_foreign_study(url):
    with_trials(optuna.create_study(study_name="s (advice)", storage=url))
    before, advice = dump(url), AdviceStore(url, "s")
    for use in (lambda: advice.keep(spent=1.0), lambda: advice.append("timed", {}), advice.read):
        with pytest.raises(ForeignStudy):
            use()
    assert dump(url) == before


def test_advice_of_ours_is_read_and_kept(url):
    AdviceStore(url, "s").keep(spent=1.0)
    AdviceStore(url, "s").keep(spent=2.0)
    assert AdviceStore(url, "s").read() == {"spent": 2.0}


@pytest.mark.parametrize("version", ["this", "earlier"])
@pytest.mark.parametrize("attributes", [0, 1, 3, 9])
def test_a_header_of_ours_that_was_cut_short_is_written_anew(url, tmp_path, version, attributes):
    """A process may be killed after any of its attributes; the first one of this version says whose
    it is."""
    whole = f"sqlite:///{tmp_path}/whole.db"
    declared(whole)
    shutil.copy(tmp_path / "whole.db", tmp_path / "study.db")
    with sqlite3.connect(tmp_path / "study.db") as connection:
        if version == "earlier":
            connection.execute("delete from study_user_attributes where key = 'made_by'")
        query = """delete from study_user_attributes where study_user_attribute_id not in
            (select study_user_attribute_id from study_user_attributes order by study_user_attribute_id limit ?)"""
        connection.execute(query, [attributes])
        keys = [
            key for (key,) in connection.execute("select key from study_user_attributes order by 1")
        ]
    assert len(keys) == attributes and "lit_dps_format" not in keys
    assert ("made_by" in keys) is (version == "this" and attributes > 0)
    declared(url)
    assert [
        trial.point for trial, _ in zip(trials_of(opened(url, None)), range(3), strict=False)
    ] == [0, 1, 2]


def test_a_database_of_another_program_is_refused_and_left_as_it_is(url):
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute("create table customers (name text)")
    before = dump(url)
    for refuse in (
        lambda: check_unchanged(url, "s", IDENTITY, CONFIG),
        lambda: declare(url, CONFIG, "workload", Goal(0.1), IDENTITY, {}),
        lambda: AdviceStore(url, "s").keep(spent=1.0),
    ):
        with refuses(url.removeprefix("sqlite:///"), "customers", error=StorageError):
            refuse()
    assert dump(url) == before


def test_a_database_that_optuna_shares_with_another_program_is_used(url):
    optuna.create_study(study_name="theirs", storage=url)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute("create table customers (name text)")
    assert declared(url)
