"""The judge of advice, on curves whose best batch size is known."""

import numpy as np
import pandas as pd
import pytest

from benchmarks import advice
from benchmarks.advice import (
    ONE_K,
    ONE_K_NOISE,
    SPLITS,
    judge,
    least_squares_curve,
    nanochat_scale,
    noise_of_second_half,
    power_curve,
    workloads,
)
from benchmarks.advice_tables import coverage
from lit_dps.analysis.observations import Observation

SIZES = [8, 16, 32, 64, 128, 256, 512]
NO_NOISE = pd.DataFrame(columns=["set", "workload", "batch_size", "noise_scale"])


def runs_of(source, c1=4e4, c2=100.0):
    steps = [c1 / b + c2 for b in SIZES]
    return pd.DataFrame({"set": source, "workload": "w", "batch_size": SIZES, "steps": steps})


@pytest.fixture
def judged(monkeypatch):
    monkeypatch.setattr(advice, "judge_step_model", lambda times: pd.DataFrame())
    noise = pd.DataFrame([{"set": "a", "workload": "w", "batch_size": 8, "noise_scale": 300.0}])
    return judge(pd.concat([runs_of("a"), runs_of("b")]), noise, pd.DataFrame())


def test_curves_that_follow_the_law_are_predicted_and_cost_nothing(judged):
    points = pd.DataFrame(judged.points)
    product = points[(points["method"] == "advice") & points["split"].isin(SPLITS)]
    assert (product["known"] != "refused").all()
    assert product["error"].abs().max() < 0.01 and product["within_80"].all()
    losses = pd.DataFrame(judged.losses)
    product = losses[(losses["method"] == "advice") & losses["split"].isin(SPLITS)]
    assert len(product) == 2 * 3 * 3 and product["lost"].max() < 0.02
    largest = losses[(losses["method"] == "largest that fits") & (losses["knee"] == 0)]
    # (100 + 78) steps of 1 + 64 units at B = 512; at B = 64 (100 + 625) of 1 + 8, the least
    expected = (100 + 4e4 / 512) * 65 / ((100 + 4e4 / 64) * 9)
    assert largest["lost"].iloc[0] == pytest.approx(expected - 1, rel=0.05)


def test_a_noise_scale_makes_one_k_a_better_guess(judged):
    points = pd.DataFrame(judged.points)
    points = points[points["method"] == "advice"]
    far = points[points["distance"] > 4]
    with_noise = far.loc[far["split"] == ONE_K_NOISE, "error"].abs().max()
    without = far.loc[far["split"] == ONE_K, "error"].abs().max()
    assert with_noise < 0.2 < without


def test_the_prior_by_the_noise_scale_is_that_of_the_other_workloads():
    """B_crit is 400 in all of them, so log(B_crit / noise scale) is log 4, log 2 and 0."""
    runs, noise = [], []
    for name, scale in (("u", 100.0), ("v", 200.0), ("w", 400.0)):
        runs.append(runs_of("a").assign(workload=name))
        noise.append({"set": "a", "workload": name, "batch_size": 8, "noise_scale": scale})
    rows = advice.judge_noise_prior(workloads(pd.concat(runs), pd.DataFrame(noise)))
    ratios = np.log([4, 2, 1])
    assert [row["ratio"] for row in rows] == pytest.approx(ratios, abs=0.05)
    assert rows[0]["median"] == pytest.approx(np.mean(ratios[1:]), abs=0.05)
    assert rows[2]["deviation"] == pytest.approx(np.std(ratios[:2], ddof=1), abs=0.05)
    # The middle one is the only one whose prior is right; all K up to 16 times beyond are judged.
    assert [row["points"] for row in rows] == [4, 4, 4] and rows[1]["within"] == 4


def test_the_coverage_has_an_interval_over_workloads():
    """Two workloads are missed as a whole and two are not, so points are not independent."""
    rows = []
    for curve, within in (("a", True), ("b", True), ("c", False), ("d", False)):
        row = {"curve": curve, "split": ONE_K, "method": "advice", "known": "law"}
        rows += 10 * [row | {"within_80": within}]
    text = coverage(advice.Judged([], rows, [], []))
    assert "| one K | 4 | 40 | 50% | 0% to 100% | 50% | 20 of 20 |" in text


def test_rival_curves_recover_what_they_describe():
    sizes = np.array([8.0, 32.0, 128.0, 512.0])
    power = [Observation(b, 5e3 * b**-0.7 + 40) for b in sizes]
    curve = power_curve(power)
    assert curve(np.array([2048.0])) == pytest.approx(5e3 * 2048**-0.7 + 40, rel=0.02)
    law = least_squares_curve([Observation(b, 4e4 / b + 100) for b in sizes])
    assert law(np.array([2048.0])) == pytest.approx(4e4 / 2048 + 100, rel=1e-3)
    assert power_curve(power[:2]) is None and least_squares_curve(power[:1]) is None


def test_the_rule_of_nanochat_is_fitted_without_the_source_that_it_is_judged_on():
    both = workloads(pd.concat([runs_of("a"), runs_of("b", c1=4e6)]), NO_NOISE)
    examples = 8 * (4e4 / 8 + 100)
    best = 128  # nearest to sqrt(c1 / c2 x 64), where the knee is in the middle of the range
    assert nanochat_scale(both, "b") == pytest.approx(best / examples**0.383, rel=0.01)
    assert nanochat_scale(both, "a") != nanochat_scale(both, "b")


def test_the_noise_scale_is_of_the_second_half_of_the_run_at_the_smallest_batch_size():
    readings = pd.DataFrame(
        {
            "workload": "w",
            "batch_size": [8, 8, 8, 8, 16],
            "iteration": [10, 20, 30, 40, 20],
            "grad_sqr": [9.0, 9.0, 1.0, 3.0, 7.0],
            "grad_var": [1.0, 1.0, 10.0, 30.0, 7.0],
        }
    )
    runs = pd.DataFrame({"set": ["pollux"], "workload": ["w"], "batch_size": [8], "steps": [40]})
    assert noise_of_second_half(readings, runs)["noise_scale"].tolist() == [8 * 40 / 4]
