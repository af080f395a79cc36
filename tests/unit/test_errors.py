"""Where an error of the user's code is said to be."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lit_dps.errors import place_in_user_code


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
