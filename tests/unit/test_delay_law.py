"""The law of batch size and delay: its formula, a known law found again, tuned runs of a quadratic, its figure."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dps.analysis import render, write_all
from lit_dps.analysis.delay import KEY, delay_of, stable_share
from lit_dps.analysis.figures import FIGURES, drawn, write_figures
from lit_dps.goal import Goal
from lit_dps.trial import Cell
from tests.unit.fake_study import analysis_of, result

BATCH_SIZES, DELAYS = (16, 64, 256, 1024), (0, 1, 2, 4, 8, 16)
FIGURE = next(figure for figure in FIGURES if figure.NAME == "delay")
GOAL = Goal(0.1, check_interval=1, max_steps=200_000)


def study(steps, delays=DELAYS, batch_sizes=BATCH_SIZES, spread=(1.0,), goal=GOAL):
    """A study of a trial for each factor in `spread`, whose steps are `steps(B, tau)` times it."""
    cells = {
        Cell(b, 0.0, ((KEY, tau),)): [
            result(Cell(b, 0.0, ((KEY, tau),)), i, round(steps(b, tau) * f)) for i, f in enumerate(spread)
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
    (law,) = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau)).delay_laws
    assert law.fit.c1 == pytest.approx(4e4, rel=2e-3) and law.fit.c2 == pytest.approx(60, rel=5e-3)
    assert law.misfit < 0.005 and law.replicates is None
    assert str(law.series) == "S=0" and law.delays == DELAYS


def test_the_delay_that_doubles_the_steps():
    (law,) = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau), spread=(1.0, 1.1, 1.3)).delay_laws
    for batch_size in (16, 1024):
        tau, (low, high) = law.doubling(batch_size)
        assert law.steps(batch_size, tau) == pytest.approx(2 * law.steps(batch_size, 0))
        assert low <= tau <= high and high < 1.5 * low + 1
    assert law.doubling(16)[0] > 20 * law.doubling(1024)[0]  # small batches tolerate delay
    assert law.doubling(10**9)[0] == pytest.approx(1.0, abs=1e-3)  # 1 / sin(pi / 6) = 2


def test_steps_that_do_not_depend_on_the_delay_miss_the_law():
    (law,) = study(lambda b, tau: 4e4 / b + 60).delay_laws
    assert law.misfit > 0.2


def quadratic(batch_size: float, tau: int, n: int = 100, target: float = 0.05) -> int:
    """Steps of a noisy quadratic with curvatures 1 / i to a target loss, at its best constant rate.

    The noise of the gradient along i has variance h_i / B (Zhang et al. 2019), and so the second moments are exact.
    """
    h = 1 / np.arange(1, n + 1)
    best = 10**6
    for share in np.geomspace(0.02, 0.95, 14):
        rate = 2 * share * stable_share(tau)
        # the impulse response w of e <- e - rate h e(t - tau): the mean is w(t), noise adds rate^2 h / B sum w^2
        w, size, noise = [np.ones(n)] * (tau + 1), h.sum(), np.zeros(n)
        for t in range(1, 4000):
            w.append(w[-1] - rate * h * w[-1 - tau])
            if t > tau:
                noise = noise + w[-1 - tau] ** 2
            loss = float((h * (w[-1] ** 2 + rate**2 * h / batch_size * noise)).sum() / size)
            if loss <= target or t >= best:
                best = min(best, t) if loss <= target else best
                break
            if loss > 1e3:
                break
    return best


def test_tuned_runs_on_a_noisy_quadratic_follow_the_law_roughly():
    """The law is an approximation: here within 20 % (root mean square)."""
    found = {(b, tau): quadratic(b, tau) for b in (1, 8, 10**6) for tau in (0, 2, 6)}
    assert all(found[b, 6] > found[b, 0] for b in (8, 10**6))
    (law,) = study(lambda b, tau: found[b, tau], delays=(0, 2, 6), batch_sizes=(1, 8, 10**6)).delay_laws
    assert law.misfit < 0.2
    assert law.fit.c2 == pytest.approx(found[10**6, 0], rel=0.25)


def test_table_report_and_figure(tmp_path):
    found = study(lambda b, tau: 4e4 / b + 60 / stable_share(tau), spread=(1.0, 1.2))
    table = found.delays
    assert list(table["delay"]) == list(DELAYS)
    assert list(table["floor"]) == pytest.approx([60 / stable_share(tau) for tau in DELAYS], rel=0.01)
    assert list(table["own_c2"]) == pytest.approx(list(table["floor"]), rel=0.02)
    text = render(found)
    assert (
        "K* = c1 / B + c2 / sin(pi / (2 (2 tau + 1))), all delays tau together\n  S=0  c1 = 40000  c2 = 60  misfit 0%"
        in text
    )
    assert "the delay that doubles K*: " in text and " at B=16 and " in text
    files, notes = write_figures([FIGURE], [found], tmp_path)
    assert {path.name for path in files} == {"delay.csv", "delay.png", "delay.pdf"} and notes == []
    names = [path.name for path in write_all(found, tmp_path / "all")[0]]
    assert {"delay-law.csv", "delay.csv"} < {*names} and len(names) == len({*names})
    assert "own_c2" in (tmp_path / "all" / "delay-law.csv").read_text()
    left, right = drawn(FIGURE, found).axes
    assert left.get_legend_handles_labels()[1] == [f"B = {b}" for b in BATCH_SIZES]
    assert right.get_xlabel() == "B / s(delay) [examples]"


def test_a_study_without_delays_has_none_of_it(tmp_path):
    plain = analysis_of({Cell(b): [result(Cell(b), 0, 16 * 40)] for b in (16, 64)}, space={})
    assert plain.delay_laws == [] and len(plain.delays) == 0 and "tau" not in render(plain)
    assert write_figures([FIGURE], [plain], tmp_path) == ([], [])


def test_k_at_the_first_check_is_left_out():
    found = study(lambda b, tau: 16, goal=Goal(0.1, 16, 1600))
    assert found.delay_laws[0].fit is None and found.delay_laws[0].k_star == {}
    assert FIGURE.missing(found) == "no law of batch size and delay yet"
