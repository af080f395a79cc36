"""Numbers of tables as texts."""

import math

import pytest

from lit_dps.analysis.tables import reading_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1024.0, "1024"),
        (0.0, "0"),
        (99.12, "99.1"),
        (2e9, "2.00e+09"),
        (math.nan, "nan"),
        (None, "-"),
    ],
)
def test_counts_of_readings_are_in_full(value, text):
    assert reading_text(value) == text
