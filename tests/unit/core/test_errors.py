"""Where an error of the user's code is said to be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lit_dps.core.errors import place_in_user_code, text_of


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
    assert text_of(error.value) == text
    assert place_in_user_code(error.value).endswith(f", in {function})")
