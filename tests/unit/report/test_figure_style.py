"""Axes, ticks and colours that all figures share."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from lit_dps.report.figures import style


def ticks_in_view(axis) -> list[str]:
    """The texts of the ticks within the limits of an axis."""
    low, high = sorted(axis.get_view_interval())
    places = [x for x in axis.get_majorticklocs() if low <= x <= high]
    return [axis.get_major_formatter()(x) for x in places]


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-4, "1e-4"), (0.5, "0.5"), (7000, "7000"), (16_384, "16384"), (30_000, "30k"), (2e6, "2M")],
)
def test_a_tick_is_the_number_itself(value, text):
    assert style.tick(value) == text


def test_large_batch_sizes_have_all_digits():
    ax = Figure().add_subplot()
    style.batch_size_axis(ax, [2**17, 2**20])
    assert ticks_in_view(ax.xaxis) == ["131072", "1048576"]


@pytest.mark.parametrize("axis", ["x", "y"])
def test_less_than_a_decade_has_several_ticks(axis):
    ax = Figure().add_subplot()
    style.log_values_axis(ax, [960, 1920], 1.15, 1.3, axis=axis)
    shown = {"x": ax.xaxis, "y": ax.yaxis}[axis]
    assert ticks_in_view(shown) == ["1000", "1500", "2000"]
    assert shown.get_view_interval() == pytest.approx([960 / 1.15, 1920 * 1.3])


def test_pale_text_is_darker_than_its_curve():
    assert style.text_colour("#0072B2") == "#0072B2"
    assert style.text_colour("#ffffff") == "#999999", "0.6 of white"


def test_no_curve_has_no_names():
    ax = Figure().add_subplot()
    style.label_ends(ax, [], 3.0)
    assert not ax.texts
