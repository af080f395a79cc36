"""Errors of the user: their fields, pickling, and the place of an error in the user's code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lit_dps.core.errors import (
    ConfigError,
    DataError,
    StorageError,
    UserError,
    error_text,
    place_in_user_code,
)
from lit_dps.storage.database import StudyLost
from lit_dps.storage.header import StudyChanged
from lit_dps.storage.ownership import ForeignStudy
from lit_dps.study.probe_run import CannotTime
from lit_dps.study.workers import WorkerDied
from tests.support.errors import refuses

FIELDS = {"key": "data.path", "value": "/nowhere", "allowed": "a folder", "hint": "create it"}


def test_a_config_error_has_fields():
    error = ConfigError("data.batch_size", 0, "at least 1", "use 32")
    assert (error.key, error.value) == ("data.batch_size", 0)
    assert (error.allowed, error.hint) == ("at least 1", "use 32")
    assert ConfigError("data.batch_size", 0, "at least 1").hint is None
    assert isinstance(error, UserError) and isinstance(error, ValueError)


def test_an_error_without_fields_has_none():
    error = StorageError("x is locked")
    assert (error.key, error.value, error.allowed, error.hint) == (None, None, None, None)


@pytest.mark.parametrize(
    "error",
    [
        UserError("wrong", **FIELDS),
        DataError("no file at x", **FIELDS),
        StorageError("x is locked", **FIELDS),
        ConfigError("data.batch_size", 0, "at least 1", "use 32"),
        StudyChanged("the code changed", parts=["my_code.py"]),
        ForeignStudy("mine"),
        StudyLost(Path("study.db"), "mine", "empty", ["figures"]),
        CannotTime("too large", above_split=True),
        WorkerDied(17, -9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_text_and_fields_when_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_refuses_compares_the_fields():
    with refuses("seed", -1) as info:
        raise ConfigError("seed", -1, "at least 0")
    assert info.value.allowed == "at least 0"
    with refuses("seed"):
        raise ConfigError("seed", -1, "at least 0")
    with pytest.raises(AssertionError), refuses("seed", 1):
        raise ConfigError("seed", -1, "at least 0")
    with pytest.raises(AssertionError), refuses("other"):
        raise ConfigError("seed", -1, "at least 0")


def solve() -> None:
    np.linalg.inv(np.zeros((2, 2)))


def parse() -> None:
    json.loads("{")


@pytest.mark.parametrize("function", [solve, parse])
def test_the_place_is_the_users_call_of_a_library(function):
    with pytest.raises(Exception) as error:
        function()
    assert place_in_user_code(error.value).endswith(f", in {function.__name__})")
    assert "test_errors.py" in place_in_user_code(error.value)


class Rows(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int):
        raise KeyError(f"row {i} has no label")


def collate(examples):
    raise ValueError("ragged rows\nin my collate")


@pytest.mark.parametrize(
    ("loader", "text", "function"),
    [
        (DataLoader(Rows(), num_workers=1), "'row 0 has no label'", "__getitem__"),
        (
            DataLoader([1, 2], num_workers=1, collate_fn=collate),
            "ragged rows in my collate",
            "collate",
        ),
    ],
)
def test_an_error_of_a_worker_of_a_loader_is_the_original_one(loader, text, function):
    with pytest.raises(Exception) as error:
        next(iter(loader))
    assert error_text(error.value) == text
    assert place_in_user_code(error.value).endswith(f", in {function})")
