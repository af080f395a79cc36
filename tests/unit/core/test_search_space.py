"""Ranges: the unit interval to a value and back, on each scale."""

import math

import numpy as np
import pytest
from scipy.stats import kstest

from lit_dps.core.errors import ConfigError
from lit_dps.core.search_space import Range, short_names

RATE = Range(1e-4, 10.0, "log")
MOMENTUM = Range(0.9, 0.9999, "reverse_log")
WIDTH = Range(-2.0, 6.0)
# at() and unit() go through log and exp, each good to one ulp of numbers up to 10: a few 1e-15 of
# the unit interval
CLOSE = 1e-12


@pytest.mark.parametrize(
    ("box", "u", "value"),
    [
        (WIDTH, 0.25, 0.0),
        (WIDTH, 0.5, 2.0),
        (RATE, 0.2, 1e-3),  # five decades, one each fifth
        (RATE, 0.8, 1.0),
        (MOMENTUM, 1 / 3, 0.99),  # 1 - x falls by three decades, from 0.1 to 1e-4
        (MOMENTUM, 2 / 3, 0.999),
    ],
)
def test_at_gives_the_value_of_the_scale(box, u, value):
    assert box.at(u) == pytest.approx(value, rel=CLOSE)
    assert box.unit(value) == pytest.approx(u, abs=CLOSE)


@pytest.mark.parametrize("box", [WIDTH, RATE, MOMENTUM])
def test_the_ends_are_the_ends_and_nothing_lies_outside(box):
    assert box.at(0.0) == pytest.approx(box.low, rel=CLOSE)
    assert box.at(1.0) == pytest.approx(box.high, rel=CLOSE)
    values = [box.at(u) for u in np.linspace(0, 1, 1001)]
    assert (
        box.low <= min(values) and max(values) <= box.high
    )  # exactly: Optuna refuses a value an ulp outside
    assert values == sorted(values)


@pytest.mark.parametrize("box", [WIDTH, RATE, MOMENTUM])
def test_unit_undoes_at(box):
    for u in np.random.default_rng(0).random(50):
        assert box.unit(box.at(u)) == pytest.approx(
            u, abs=1e-10
        )  # 1 - x loses three digits near 0.9999


def test_reverse_log_is_uniform_in_the_log_of_one_minus_x():
    u = np.random.default_rng(1).random(2000)
    x = np.array([MOMENTUM.at(v) for v in u])
    scaled = np.log10((1 - x) / (1 - MOMENTUM.high)) / 3  # 0 at high, 1 at low
    np.testing.assert_allclose(scaled, 1 - u, atol=1e-10)
    assert kstest(scaled, "uniform").pvalue > 0.01
    assert kstest(x, "uniform", (0.9, 0.0999)).pvalue < 1e-6  # a linear draw would have passed here


def test_integers_include_both_ends_and_are_equally_likely():
    box = Range(3, 7, integer=True)
    values = [box.at((i + 0.5) / 5000) for i in range(5000)]
    assert all(type(value) is int for value in values)
    assert {value: values.count(value) for value in values} == {
        value: 1000 for value in range(3, 8)
    }
    assert (box.at(0.0), box.at(1.0)) == (3, 7)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_plain_sobol_points_hit_every_integer_once(m):
    """They are the multiples of 2^-m, which fall on the bounds between integers: no rounding to
    even there."""
    box = Range(1, 2**m, integer=True)
    assert [box.at(i / 2**m) for i in range(2**m)] == list(range(1, 2**m + 1))


def test_log_integers_own_the_log_of_their_interval():
    box, n = Range(1, 8, "log", integer=True), 20_000
    values = np.array([box.at((i + 0.5) / n) for i in range(n)])
    for value in range(1, 9):
        share = math.log((value + 0.5) / (value - 0.5)) / math.log(8.5 / 0.5)
        assert np.mean(values == value) == pytest.approx(
            share, abs=1.5 / n
        )  # n points see an end within one of them


@pytest.mark.parametrize(
    ("u", "end"),
    [
        (0.0, "low"),
        (0.049, "low"),
        (0.051, None),
        (0.5, None),
        (0.949, None),
        (0.951, "high"),
        (1, "high"),
    ],
)
@pytest.mark.parametrize("box", [WIDTH, RATE, MOMENTUM])
def test_the_outer_twentieth_of_the_scale_is_the_boundary(box, u, end):
    assert box.boundary(box.at(u)) == end


@pytest.mark.parametrize(
    ("box", "key", "says"),
    [
        (Range(1, 1), "k", "a range with low below high"),
        (Range(2, 1), "k", "a range with low below high"),
        (Range(math.nan, 1), "k", "a range with finite ends"),
        (Range(0, math.inf), "k", "a range with finite ends"),
        (Range(0, 1, "cubic"), "k.scale", "one of linear, log, reverse_log"),
        (Range(0, 1, "log"), "k", "a range that starts above 0, for the scale log"),
        (Range(-1, 1, "log"), "k", "a range that starts above 0, for the scale log"),
        (Range(0.5, 1, "reverse_log"), "k", "a range that ends below 1, for the scale reverse_log"),
        (Range(0.5, 3, integer=True), "k", "a range with whole ends, for integer: true"),
        (Range(0, 3.5, integer=True), "k", "a range with whole ends, for integer: true"),
    ],
)
def test_check_refuses_and_names_key_value_and_what_is_allowed(box, key, says):
    with pytest.raises(ConfigError) as caught:
        box.check("k")
    assert (caught.value.key, caught.value.allowed) == (key, says)
    shown = box.scale if key.endswith("scale") else f"[{box.low:g}, {box.high:g}]"
    assert caught.value.value == shown


@pytest.mark.parametrize(
    "box", [WIDTH, RATE, MOMENTUM, Range(3, 7, integer=True), Range(1, 64, "log", integer=True)]
)
def test_check_accepts_a_sound_range(box):
    box.check("k")


def test_short_names_are_the_last_part_unless_two_keys_share_it():
    assert short_names(["model.learning_rate", "model.momentum", "data.momentum"]) == {
        "model.learning_rate": "learning_rate",
        "model.momentum": "model.momentum",
        "data.momentum": "data.momentum",
    }
    assert short_names(["plain"]) == {"plain": "plain"}
