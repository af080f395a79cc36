"""The law of batch size and delay: its formula, a known law found again, tuned runs of a quadratic,
its figure."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.delay import KEY, DelayLaw, critical_delay_rows, delay_of, stable_share
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import LawConstants
from lit_dps.analysis.law_verdict import LawVerdict, Trust
from lit_dps.analysis.tables import records
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Series
from lit_dps.report.figures import FIGURES, drawn, write_figures
from lit_dps.report.publish import write_all
from lit_dps.report.text import delay_text, render
from tests.support.fake_study import analysis_of, result
from tests.support.quadratic import NoisyQuadraticModel
from tests.support.texts import figure_texts

pytestmark = pytest.mark.pictures

BATCH_SIZES, DELAYS = (16, 64, 256, 1024), (0, 1, 2, 4, 8, 16)
FIGURE = next(figure for figure in FIGURES if figure.NAME == "delay")
GOAL = Goal(0.1, check_interval=1, max_steps=200_000)


def study(steps, delays=DELAYS, batch_sizes=BATCH_SIZES, spread=(1.0,), goal=GOAL):
    """A study of a trial for each factor in `spread`, whose steps are `steps(B, tau)` times it."""
    cells = {
        Cell(b, 0.0, ((KEY, tau),)): [
            result(Cell(b, 0.0, ((KEY, tau),)), i, round(steps(b, tau) * f))
            for i, f in enumerate(spread)
        ]
        for b in batch_sizes
        for tau in delays
    }
    return analysis_of(cells, space={}, goal=goal, axes={KEY: list(delays)})


def test_the_share_of_the_stable_rate_and_its_inverse():
    assert [round(stable_share(tau), 6) for tau in (0, 1, 2)] == [1.0, 0.5, 0.309017]
    assert stable_share(100) == pytest.approx(math.pi / 402, rel=1e-4)
    for tau in (0, 0.5, 3, 40):
        assert delay_of(stable_share(tau)) == pytest.approx(tau, abs=1e-9)


def test_a_known_law_is_found_again_from_all_delays_together():
    found = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau))
    (law,) = found.delay_laws
    assert law.fit.c1 == pytest.approx(4e4, rel=2e-3) and law.fit.c2 == pytest.approx(60, rel=5e-3)
    assert law.misfit < 0.005
    assert str(law.series) == "S=0" and tuple(law.separate) == DELAYS
    record = found.record
    warm_up = {"schedule": "doubling", "options": {"start": 0.5, "steps": 10}}
    growing = Analysis(dataclasses.replace(record, config={"batch": warm_up}))
    assert growing.delay_laws == [] and len(growing.laws) == len(DELAYS)


def test_the_delay_that_doubles_the_steps():
    (law,) = study(
        lambda b, tau: 4e4 / b + 60 / stable_share(tau), spread=(1.0, 1.1, 1.3)
    ).delay_laws
    for batch_size in (16, 1024):
        tau, (low, high) = law.critical_delay(batch_size)
        assert law.predicted(tau).steps(batch_size) == pytest.approx(
            2 * law.predicted(0).steps(batch_size)
        )
        assert low <= tau <= high and high < 1.5 * low + 1
    assert (
        law.critical_delay(16)[0] > 20 * law.critical_delay(1024)[0]
    )  # small batches tolerate delay
    assert law.critical_delay(10**9)[0] == pytest.approx(1.0, abs=1e-3)  # 1 / sin(pi / 6) = 2


def test_a_delay_that_the_data_do_not_show_has_only_a_lower_limit():
    """K scales perfectly up to B = 32; or the delay that doubles K is far beyond delay 1."""
    perfect = study(
        lambda b, tau: 4e4 / b + 0.5 / stable_share(tau), delays=(0, 1), batch_sizes=(4, 8, 16, 32)
    )
    (law,) = perfect.delay_laws
    assert law.joint.describes_k and not law.joint.is_b_crit_known
    table = perfect.critical_delays
    assert table["critical_delay"].isna().all() and np.isinf(table["high"]).all()
    assert table["low"].tolist()[0] == 16 * 2 - 1
    assert "doubles at delay > 31 at B=4" in delay_text(perfect)
    sizes = (4, 16, 64, 1024, 4096)
    far = study(
        lambda b, tau: 4e4 / b + 60 / stable_share(tau), delays=(0, 1), batch_sizes=sizes
    ).critical_delays
    assert far["critical_delay"].isna().tolist() == [True, True, False, False, False]
    assert far["low"].tolist()[:2] == [31, 31] and far["high"].tolist()[:2] == [math.inf] * 2
    assert far["critical_delay"].tolist()[2] == pytest.approx(9.2, rel=0.02)


def test_a_delay_without_a_k_star_does_not_extend_the_reach_of_the_law():
    """Every trial of delay 16 meets the goal at its first check, so each K* there is a bound."""

    def steps(batch_size, delay):
        if delay == 16:
            return 1
        return 4e4 / batch_size + 60 / stable_share(delay)

    (law,) = study(steps, delays=(0, 1, 16), batch_sizes=(4, 16, 64, 1024, 4096)).delay_laws
    assert set(law.separate) == {0, 1, 16} and {delay for _, delay in law.k_star} == {0, 1}
    value, (low, high) = law.known_critical_delay(4)
    assert math.isnan(value) and (low, high) == (31, math.inf)


def test_two_points_meet_any_law():
    (law,) = study(
        lambda b, tau: 4e4 / b + 60 / stable_share(tau), delays=(0, 2), batch_sizes=(16,)
    ).delay_laws
    assert law.fit is None and len(law.k_star) == 2


def test_steps_that_do_not_depend_on_the_delay_miss_the_law():
    (law,) = study(lambda b, tau: 4e4 / b + 60).delay_laws
    assert law.misfit > 0.2


# K* of the noisy quadratic of 500 axes to an expected loss of 0.02 by batch size, then delay, at
# the best constant rate of a coarse grid: computed by another program than this package.
WITHOUT_NOISE = 2**40
COARSE = {
    WITHOUT_NOISE: {0: 283, 1: 555, 2: 1030, 4: 1586, 8: 3028, 16: 5783, 32: 13707},
    256: {0: 552, 1: 841, 2: 1202, 4: 2092, 8: 3458, 16: 6380, 32: 13830},
    16: {0: 5746, 1: 5938, 2: 6198, 4: 6707, 8: 7862, 16: 10636, 32: 16244},
}


def test_the_floor_without_a_delay_predicts_those_with_one():
    law = DelayLaw(Series(0.0), {}, Law((), fit=LawConstants(1e4, 283)))
    predicted = {tau: law.predicted(tau).steps(WITHOUT_NOISE) for tau in COARSE[WITHOUT_NOISE]}
    assert list(predicted.values()) == pytest.approx(
        [283, 566, 916, 1630, 3066, 5949, 11710], rel=2e-3
    )
    assert all(abs(k / COARSE[WITHOUT_NOISE][tau] - 1) < 0.15 for tau, k in predicted.items())


def test_the_law_holds_the_golden_values_and_each_delay_alone_agrees():
    sizes, delays = tuple(COARSE), tuple(COARSE[16])
    found = study(lambda b, tau: COARSE[b][tau], delays=delays, batch_sizes=sizes)
    (law,) = found.delay_laws
    assert law.misfit < 0.07
    assert all(
        abs(law.predicted(tau).steps(b) / COARSE[b][tau] - 1) < 0.2 for b in sizes for tau in delays
    )
    assert law.fit.c1 == pytest.approx(16 * (5746 - 283), rel=0.08) and law.fit.c2 == pytest.approx(
        283, rel=0.03
    )
    rows = {row["delay"]: row for row in records(found.delays)}
    for tau, row in rows.items():
        assert row["own_misfit"] < 0.1 and row["own_c2"] == pytest.approx(row["floor"], rel=0.17)
        each = [math.log(COARSE[b][tau] / law.predicted(tau).steps(b)) for b in sizes]
        assert row["misfit_here"] == pytest.approx(np.sqrt(np.mean(np.square(each))))
    assert rows[4]["own_c1"] == pytest.approx(law.fit.c1, rel=0.1)


@pytest.mark.parametrize(
    ("batch_size", "tau", "shares"),
    [
        (np.inf, 0, np.linspace(0.98, 0.999, 6)),
        (np.inf, 1, np.linspace(0.98, 0.999, 4)),
        (256, 0, np.linspace(0.6, 0.8, 6)),
        (256, 1, np.linspace(0.79, 0.82, 3)),
        (256, 2, np.linspace(0.8, 0.9, 3)),
        (16, 0, np.linspace(0.06, 0.09, 6)),
    ],
)
def test_the_golden_values_are_found_again(batch_size, tau, shares):
    """A finer grid finds the same or fewer steps: up to 5 % here, at rates just below the stable
    one."""
    coarse = COARSE[batch_size if batch_size < np.inf else WITHOUT_NOISE][tau]
    k_star = NoisyQuadraticModel(500).k_star(
        0.02, batch_size, 2 * shares * stable_share(tau), delay=tau
    )
    assert 0.95 * coarse <= k_star <= 1.005 * coarse


def exact(batch_sizes, delays, target=0.1):
    """K* of the noisy quadratic by batch size and delay, at the best of 40 constant rates; see its
    own tests."""
    model, shares = NoisyQuadraticModel(50), np.geomspace(0.03, 0.99, 40)
    return {
        (b, tau): round(model.k_star(target, b, 2 * shares * stable_share(tau), delay=tau))
        for b in batch_sizes
        for tau in delays
    }


def test_the_noisy_quadratic_keeps_to_the_law():
    """Known truth: 40 cells over a factor of 30 in K*, by two numbers within 5 % (root mean
    square)."""
    sizes = (4, 8, 16, 32, 64, 256, 1024, 2**20)
    found = exact(sizes, (0, 1, 2, 4, 16))
    assert max(found.values()) > 30 * min(found.values())
    (law,) = study(
        lambda b, tau: found[b, tau], delays=(0, 1, 2, 4, 16), batch_sizes=sizes
    ).delay_laws
    assert law.misfit < 0.05
    assert law.fit.c2 == pytest.approx(found[2**20, 0], rel=0.1)
    (alone,) = study(lambda b, tau: found[b, tau], delays=(0,), batch_sizes=sizes).laws.values()
    (stale,) = study(lambda b, tau: found[b, tau], delays=(4,), batch_sizes=sizes).laws.values()
    assert law.fit.c1 == pytest.approx(alone.fit.c1, rel=0.1) and stale.fit.c1 == pytest.approx(
        alone.fit.c1, rel=0.25
    )
    assert stale.fit.c2 == pytest.approx(alone.fit.c2 / stable_share(4), rel=0.1)


def test_the_critical_delay_is_the_one_that_doubles_the_steps_of_the_noisy_quadratic():
    sizes, delays = (4, 16, 64, 1024), (0, 1, 2, 3, 4, 6, 8, 10, 12)
    found = exact(sizes, delays)
    (law,) = study(
        lambda b, tau: found[b, tau], delays=delays, batch_sizes=sizes, spread=(1.0, 1.05, 1.2)
    ).delay_laws
    for b in sizes:
        true = float(np.interp(2 * found[b, 0], [found[b, tau] for tau in delays], delays))
        tau, (low, high) = law.critical_delay(b)
        assert tau == pytest.approx(true, rel=0.25, abs=0.2)
        assert 0.75 * low - 0.2 <= true <= 1.25 * high + 0.2


def test_the_table_has_the_separate_laws_beside_the_joint_one():
    found = study(
        lambda b, tau: (2 if tau == 8 else 1) * 4e4 / b + 60 / stable_share(tau), spread=(1.0, 1.1)
    )
    rows = found.delays.set_index("delay")
    assert list(rows.index) == list(DELAYS)
    assert rows["own_c1"][4] == pytest.approx(4e4, rel=0.02)
    assert rows["own_c1"][8] == pytest.approx(8e4, rel=0.02)
    assert rows["own_misfit"][8] <= 0.01 and found.delay_laws[0].misfit > 0.1
    assert rows["misfit_here"][8] > 0.15


@pytest.mark.pictures("delay")
def test_table_report_and_figure(tmp_path, golden):
    found = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau), spread=(1.0, 1.2))
    table = found.delays
    assert list(table["delay"]) == list(DELAYS)
    assert list(table["floor"]) == pytest.approx(
        [60 / stable_share(tau) for tau in DELAYS], rel=0.01
    )
    assert list(table["own_c2"]) == pytest.approx(list(table["floor"]), rel=0.02)
    assert delay_text(found) in render(found)
    golden.check("analysis/delay.txt", delay_text(found))
    files, notes = write_figures([FIGURE], [found], tmp_path)
    assert {path.name for path in files} == {"delay.csv", "delay.png", "delay.pdf"} and notes == []
    names = [path.name for path in write_all(found, tmp_path / "all")[0]]
    assert {"delay-law.csv", "critical-delays.csv", "delay.csv"} < {*names} and len(names) == len(
        {*names}
    )
    (law,) = found.delay_laws
    for row in records(found.critical_delays):
        assert (row["critical_delay"], (row["low"], row["high"])) == law.critical_delay(
            row["batch_size"]
        )
    assert list(found.critical_delays["batch_size"]) == list(BATCH_SIZES)
    assert "own_c2" in (tmp_path / "all" / "delay-law.csv").read_text()
    figure = drawn(FIGURE, found)
    left, right = figure.axes
    assert {text.get_text() for text in left.texts} == {f"B = {b}" for b in BATCH_SIZES}
    *delays, law_entry = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(delays) == len(set(found.delay_points["delay"])) and law_entry == "law"
    golden.check("figures/delay.txt", figure_texts(figure))


def test_a_study_without_delays_has_none_of_it(tmp_path):
    plain = analysis_of({Cell(b): [result(Cell(b), 0, 16 * 40)] for b in (16, 64)}, space={})
    assert plain.delay_laws == [] and len(plain.delays) == 0 and "tau" not in render(plain)
    assert write_figures([FIGURE], [plain], tmp_path) == ([], [])


def test_k_at_the_first_check_is_left_out():
    found = study(lambda b, tau: 16, goal=Goal(0.1, 16, 1600))
    assert found.delay_laws[0].fit is None and found.delay_laws[0].k_star == {}
    assert "delay" in FIGURE.missing(found)


def test_a_joint_law_that_does_not_describe_k_has_no_critical_delay():
    found = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau))
    (law,) = found.delay_laws
    assert len(critical_delay_rows([law])) == len(BATCH_SIZES)
    refused = dataclasses.replace(
        law.joint, verdict=LawVerdict(Trust.INTERPOLATED, "it does not fit")
    )
    law = dataclasses.replace(law, joint=refused)
    assert not len(critical_delay_rows([law]))
    found.delay_laws = [law]
    assert "it does not fit" in delay_text(found) and "doubles" not in delay_text(found)
