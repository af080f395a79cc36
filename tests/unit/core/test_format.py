"""Numbers for people: significant digits, no exponents where digits can be read, errors of laws."""

from __future__ import annotations

import math
import sys

import pytest

from lit_dps.analysis.rates import rate_law, spacing_of
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.text import (
    duration_unit,
    for_terminal,
    format_duration,
    number_text,
    prose_for_terminal,
)
from tests.support.texts import numbers_in


@pytest.mark.parametrize(
    ("number", "text"),
    [(24, "24"), (10.0, "10"), (9.96, "10"), (1.0, "1.0"), (1984, "2000"), (0.00312, "0.0031"), (-7.06, "-7.1"),
     (0, "0"), (math.inf, "inf"), (2.05e-13, "2.1e-13"), (0.09999, "0.10"), (4.24e9, "4.2e+09")],
)  # fmt: skip
def test_two_significant_digits(number, text):
    assert number_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0, "0 s"),
        (2.05e-13, "less than 1 ns"),
        (3e-9, "3.00 ns"),
        (4.11e-6, "4.11 us"),
        (0.0081, "8.10 ms"),
        (0.9996, "1000 ms"),
        (1, "1.00 s"),
        (42, "42.0 s"),
        (119, "119 s"),
        (186, "3.10 min"),
        (9000, "2.50 h"),
        (1.04e6, "12.0 days"),
        (86_400 * 18_363.4, "18400 days"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "unit"),
    [(2e-13, ("s", 1.0)), (0, ("s", 1.0)), (5e-7, ("ns", 1e-9)), (200, ("min", 60.0))],
)
def test_the_unit_of_a_duration(seconds, unit):
    assert duration_unit(seconds) == unit


def test_durations_of_two_digits():
    assert format_duration(0.00124, digits=2) == "1.2 ms"
    assert format_duration(300, digits=2) == "5.0 min"


def test_rates_on_a_grid_are_known_no_better_than_its_spacing():
    grid = [0.01 * 2**i for i in range(6)]
    spacing = spacing_of(grid)
    assert spacing == pytest.approx(math.log(2))
    law = rate_law([8, 32, 128], [0.04] * 3, spacing=spacing)
    x = [math.log(b) for b in (8, 32, 128)]
    mean = sum(x) / 3
    assert law.exponent == pytest.approx(0)
    assert law.error == pytest.approx(spacing / math.sqrt(sum((each - mean) ** 2 for each in x)))
    assert "B^0.00 +- 0.35 " in law.describe() and " x2.0" in law.describe()
    assert (
        rate_law([8, 32], [0.04, 0.04], spacing=spacing).error > 0.1
    )  # two batch sizes have no other error
    assert rate_law([8, 32, 128], [0.04, 0.4, 0.04], spacing=spacing).scatter > spacing


def test_an_unresolved_noise_scale_shows_an_interval_that_includes_zero():
    text = str(NoiseScale(3.4, 1.5, 20.0, 2.0, 1.7834, math.inf, 64, 32))
    low, high = (float(x) for x in text.partition("[")[2].partition("]")[0].split(","))
    assert low < 0 < high and (low + high) / 2 == pytest.approx(3.4, abs=0.1)
    assert numbers_in(text)[:1] == [1.78] and "|G|^2 = 3.4" in text
    wide = NoiseScale(24, 11, 20.0, 2.0, 79.2, math.inf, 64, 32)
    assert "e+" not in str(wide)
    assert str(NoiseScale(0.2, 0.01, 22.2, 2.0, 79.2, 1984.0, 64, 32)) == "111 [79.2, 1980]"


def test_a_terminal_wraps_prose_and_keeps_tables(monkeypatch):
    text = "timed at B = 8, 128 with 1 thread\n\n     B     trials\n     8         32"
    assert prose_for_terminal(text) == for_terminal(text) == text, "a file keeps its lines"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "15")
    lines = prose_for_terminal(text).splitlines()
    assert lines[:3] == ["timed at B = 8,", "  128 with 1", "  thread"]
    assert lines[3:] == text.splitlines()[1:], "rows are not broken"
    assert for_terminal("ok   a b c d e f g h", " " * 5).splitlines() == [
        "ok   a b c d e",
        "     f g h",
    ]
    assert for_terminal(text, stream=sys.stderr) == text, "stderr is no terminal here"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert for_terminal("error: a b c d e f", stream=sys.stderr).splitlines() == [
        "error: a b c d",
        "  e f",
    ]
