"""The loss of a batch size for a fixed amount of data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lit_dps.analysis.fixed_data import fixed_data_losses
from lit_dps.analysis.intervals import Interval
from tests.support.errors import refuses


def power_curve(alpha: float = 0.1, noise: float = 0.0) -> pd.DataFrame:
    examples = np.arange(1, 41) * 1000.0
    rng = np.random.default_rng(0)
    loss = 5 * examples**-alpha * np.exp(noise * rng.standard_normal(40))
    return pd.DataFrame({"examples": examples, "loss": loss})


def seeds_at(*examples: int) -> pd.DataFrame:
    """Return the losses of three seeds after some numbers of examples."""
    return pd.DataFrame({"examples": 3 * examples, "loss": np.linspace(1, 2, 3 * len(examples))})


def test_the_cost_of_a_batch_size_has_a_closed_form():
    """With loss = A N^-alpha the cost is ((1 + B / C) / (1 + B0 / C))^alpha - 1."""
    sizes = [16, 32, 64, 128, 256]
    found = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, sizes)
    expected = ((1 + np.array(sizes) / 500) / (1 + 32 / 500)) ** 0.1 - 1
    assert found.table["cost"].to_numpy() == pytest.approx(expected, abs=1e-9)
    assert list(found.table["steps"]) == [30_000 / size for size in sizes]
    assert list(found.table["known"]) == ["extrapolated"] + ["law"] * 4
    # Costs are .0058 at B = 64, .0167 at 128.
    assert found.largest == 64
    assert found.describe().startswith(
        "With 30000 examples batch sizes up to 64 cost less than 1.0 %"
    )
    wide = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, sizes, tolerance=0.02)
    assert wide.largest == 128


def test_an_uncertain_critical_batch_size_widens_the_cost():
    sizes = [32, 64, 128]
    found = fixed_data_losses(power_curve(), 32, Interval(250, 1000), 30_000, sizes)
    low, high = found.table["low"].to_numpy(), found.table["high"].to_numpy()

    def cost(critical):
        return ((1 + np.array(sizes) / critical) / (1 + 32 / critical)) ** 0.1 - 1

    assert low == pytest.approx(cost(1000), rel=0.1) and high == pytest.approx(cost(250), rel=0.1)
    assert found.largest == 64


def test_noise_of_the_curve_widens_the_cost():
    """The interval holds the truth, and it is wider than without noise."""
    quiet = fixed_data_losses(power_curve(), 32, Interval(500, 500), 40_000, [256])
    noisy = fixed_data_losses(power_curve(noise=0.01), 32, Interval(500, 500), 40_000, [256])
    (row,) = noisy.table.to_dict("records")
    assert row["low"] < quiet.table["cost"][0] < row["high"]
    assert row["high"] - row["low"] > 0.01


def test_a_batch_size_whose_loss_is_before_the_curve_is_refused():
    found = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, [32, 6000])
    assert list(found.table["known"]) == ["law", "refused"]
    assert math.isnan(found.table["cost"][1]) and found.largest == 32
    large = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, [256])
    assert large.largest is None
    assert "every larger batch size costs more than 1.0 % of the loss" in large.describe()


def test_a_refused_cost_is_not_called_a_high_cost():
    """The cost at B = 6000 is unknown. The answer must not say that it exceeds the tolerance."""
    refused = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, [6000])
    assert refused.largest is None
    assert "B = 6000 on is unknown" in refused.describe()
    assert "costs more" not in refused.describe()
    known = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, [64, 6000])
    assert known.largest == 64 and "from B = 6000 on the cost is unknown" in known.describe()
    between = fixed_data_losses(power_curve(), 32, Interval(500, 500), 30_000, [64, 256, 6000])
    assert between.largest == 64 and "unknown" not in between.describe()


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ((power_curve(), 32, Interval(1, 2), 41_000, [64]), "examples", 41_000),
        ((power_curve(), 0, Interval(1, 2), 40_000, [64]), "batch_size", 0),
        ((power_curve().head(5), 32, Interval(1, 2), 5000, [64]), "curve", "5 validations"),
        ((seeds_at(20_000, 40_000), 32, Interval(1, 2), 40_000, [64]), "curve", "6 validations"),
        ((power_curve(), 32, Interval(0, 2), 40_000, [64]), "critical", (0, 2)),
        (
            (power_curve().drop(columns="loss"), 32, Interval(1, 2), 9, [64]),
            "columns",
            ["examples"],
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(arguments, key, value):
    with refuses(key, value):
        fixed_data_losses(*arguments)
