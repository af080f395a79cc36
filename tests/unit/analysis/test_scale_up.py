"""Steps at a larger size, from smaller sizes: closed forms, calibration and refusals."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lit_dps.analysis.scale_up import DRAWS, fit_scale_up
from tests.support.errors import refuses

SIZES = (1e4, 2e4, 4e4)
BATCH_SIZES = (16, 64, 256, 1024)


def k_of(size, batch_size, power=0.5):
    """c1 = 5e5 (D / 20000)^0.3, B_crit = 200 (D / 20000)^power."""
    x = np.asarray(size) / 2e4
    return 5e5 * x**0.3 * (1 / np.asarray(batch_size) + 1 / (200 * x**power))


def table(sizes=SIZES, batch_sizes=BATCH_SIZES, power=0.5, factors=None) -> pd.DataFrame:
    rows = [(size, b, float(k_of(size, b, power))) for size in sizes for b in batch_sizes]
    runs = pd.DataFrame(rows, columns=["size", "batch_size", "steps"])
    if factors is not None:
        runs["steps"] *= factors
    return runs


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_law_of_exact_steps_is_found_again(power):
    law = fit_scale_up(table(power=power))
    assert law.misfit < 0.01 and law.is_power_known
    assert law.power.low <= power <= law.power.high
    predicted = law.predict(4e5, [16, 256, 4096])
    truth = k_of(4e5, [16, 256, 4096], power)
    assert predicted["steps"].to_numpy() == pytest.approx(truth, rel=0.06)
    assert (predicted["low"] < truth).all() and (predicted["high"] > truth).all()
    assert list(predicted["known"]) == ["extrapolated"] * 3
    inside = law.predict(2e4, [64, 300])
    assert inside["steps"].to_numpy() == pytest.approx(k_of(2e4, [64, 300], power), rel=0.02)
    assert list(inside["known"]) == ["law", "law"]
    critical = law.critical(4e5)
    assert critical.low < 200 * 20**power < critical.high


def test_intervals_grow_with_the_distance():
    law = fit_scale_up(table())
    widths = []
    for size in (4e4, 1e5, 4e5):
        (row,) = law.predict(size, [64]).to_dict("records")
        widths.append(math.log(row["high"] / row["low"]))
    assert widths == sorted(widths) and widths[2] > 1.2 * widths[0]


def test_intervals_are_calibrated_on_a_known_law():
    """Errors of 5 % of each K, and 5 % that the K of a size share, at ten times the largest size.

    Of 40 data sets 95 % intervals miss 2 on average, and 80 % intervals 8."""
    rng = np.random.default_rng(3)
    inside = {95: 0, 80: 0}
    for _ in range(40):
        shared = np.repeat(rng.standard_normal(3), 4)
        law = fit_scale_up(table(factors=np.exp(0.05 * (rng.standard_normal(12) + shared))))
        truth = k_of(4e5, 256) * math.exp(0.05 * rng.standard_normal(2).sum())
        samples = law.samples(4e5, [256])[:, 0]
        for share in inside:
            low, high = np.percentile(samples, [50 - share / 2, 50 + share / 2])
            inside[share] += bool(low <= truth <= high)
    assert 35 <= inside[95] <= 40 and 27 <= inside[80] <= 38


def test_a_lower_bound_raises_the_prediction():
    runs = table(batch_sizes=(16, 32, 64), factors=np.exp(0.05 * np.cos(np.arange(9))))
    free = fit_scale_up(runs)
    bound = 2.0 * float(np.median(free.samples(4e4, [1024])))
    row = {"size": 4e4, "batch_size": 1024, "steps": bound, "censored": 1}
    with_bound = fit_scale_up(pd.concat([runs.assign(censored=0), pd.DataFrame([row])]))
    blank = fit_scale_up(pd.concat([runs, pd.DataFrame([row])]))  # blank: not censored
    assert np.array_equal(blank.draws, with_bound.draws)
    assert len(with_bound.draws) == DRAWS
    assert np.median(with_bound.samples(4e4, [1024])) > 1.2 * np.median(free.samples(4e4, [1024]))
    assert np.median(with_bound.critical(4e4)) < np.median(free.critical(4e4))


def test_a_power_that_the_data_do_not_show_is_not_named():
    """Far below B_crit K is c1 / B at every size, and predicted all the same."""
    law = fit_scale_up(table(batch_sizes=(0.25, 0.5, 1.0)))
    assert not law.is_power_known and law.describe().startswith("how B_crit grows with the size is")
    (row,) = law.predict(4e5, [0.5]).to_dict("records")
    assert row["low"] < float(k_of(4e5, 0.5)) < row["high"]
    assert fit_scale_up(table()).describe().startswith("B_crit grows with the power 0.5")


@pytest.mark.parametrize("power", [-1.5, 2.0, 2.5, 3.0])
def test_a_power_at_a_limit_of_the_search_is_unknown(power):
    law = fit_scale_up(table(power=power))
    assert not law.is_power_known and law.is_power_at_limit
    assert law.power.high - law.power.low < 0.5
    inside = fit_scale_up(table(power=1.5))
    assert inside.is_power_known and not inside.is_power_at_limit


def test_batch_sizes_and_sizes_too_far_away_are_refused():
    law = fit_scale_up(table())
    low, high = law.predict(4e5, [0.9, 17_000]).to_dict("records")
    assert low["known"] == high["known"] == "refused" and math.isnan(low["steps"])
    for size in (4.1e5, 9e2):
        with refuses("size", size):
            law.predict(size, [64])
        with refuses("size", size):
            law.critical(size)


@pytest.mark.parametrize(
    ("runs", "key", "value"),
    [
        (table().drop(columns="steps"), "runs", ["size", "batch_size"]),
        (table(sizes=SIZES[:2]), "runs.size", "10000, 20000"),
        (table(sizes=(1e4, 1.1e4, 2e4)), "runs.size", "10000, 11000, 20000"),
        (table(batch_sizes=(16, 64)), "runs.batch_size", "16, 64"),
        (table().assign(steps=0.0), "runs.steps", 0.0),
        (table().assign(batch_size="many"), "runs.batch_size", "many"),
        (pd.concat([table(), table()]), "runs.batch_size", "16 twice"),
        (table().assign(censored=1), "runs.size", ""),
    ],
)
def test_data_that_do_not_suffice_are_refused(runs, key, value):
    with refuses(key, value):
        fit_scale_up(runs)


def test_data_that_follow_another_law_are_refused():
    """K rises with B at the middle size."""
    runs = table()
    middle = runs["size"] == 2e4
    runs.loc[middle, "steps"] = runs.loc[middle, "steps"].to_numpy()[::-1]
    with refuses("runs"):
        fit_scale_up(runs)
