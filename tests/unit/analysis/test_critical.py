"""All critical batch sizes in one table: known ones are found again, and what cannot be known is
told."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.critical import DEFINITIONS, PooledExamples
from lit_dps.analysis.law_fit import LawConstants
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.trial import Cell, Series
from lit_dps.report.notebook import Study
from lit_dps.report.publish import write_all
from lit_dps.report.text import critical_text, render
from tests.support.fake_study import analysis_of, result, theory_terms
from tests.support.quadratic import NoisyQuadraticModel
from tests.support.texts import numbers_in

SIZES = (2, 8, 32, 128, 512, 2048)
GOAL = Goal(0.1, check_interval=1, max_steps=10**7)
LAW = LawConstants(1e6, 5e3)  # B_crit = 200


def study(steps=LAW.steps, sizes=SIZES, spread=(1.0, 1.05, 1.2, 1.5), keep=lambda b, k: {}):
    cells = {
        Cell(b): [
            result(Cell(b), i, round(steps(b) * f), **keep(b, round(steps(b) * f)))
            for i, f in enumerate(spread)
        ]
        for b in sizes
    }
    return analysis_of(cells, space={}, goal=GOAL)


def found(analysis):
    return analysis.critical_batch_sizes[Series(0.0)]


def test_the_law_and_what_is_read_off_without_it_agree_where_the_law_holds():
    by = found(study())
    assert by["law"].value == pytest.approx(200, rel=0.01)
    assert by["overhead"].value == pytest.approx(1.2 * 2 + 0.2 * 200, rel=0.01)
    # B K = c1 + c2 B is (1 + x) times that at B0 at (1 + x) B0 + x B_crit; the rest is
    # interpolation between sizes
    assert by["linear_20"].value == pytest.approx(1.2 * 2 + 0.2 * 200, rel=0.15)
    assert by["linear_50"].value == pytest.approx(1.5 * 2 + 0.5 * 200, rel=0.15)
    for name in ("law", "overhead", "linear_20", "linear_50"):
        low, high = by[name].interval
        assert low <= by[name].value <= high and by[name].note == ""
    assert "*" not in critical_text(study())
    assert [str(by[name]) for name in ("theory", "noise_scale", "noise_law")] == ["-"] * 3


def test_one_bad_cell_is_no_end_of_linear_scaling():
    batch = np.array([2.0, 4, 8, 16, 32])
    perfect = 1000 / batch
    assert math.isinf(PooledExamples.of(batch, perfect).end(0.2))
    bad = perfect * [1, 1.3, 1, 1, 1]  # pooled with those after it
    assert math.isinf(PooledExamples.of(batch, bad).end(0.2))
    assert PooledExamples.of(batch, perfect * [1, 1, 1, 1, 1.5]).end(0.2) == pytest.approx(
        16 * 2 ** (math.log(1.2) / math.log(1.5))
    )


def test_an_end_has_the_interval_of_the_noise_of_k_star():
    narrow, wide = found(study(spread=(1.0, 1.01))), found(study(spread=(1.0, 1.5)))
    for name in ("linear_20", "linear_50"):
        assert narrow[name].value == wide[name].value
        low, high = narrow[name].interval
        assert 2 < low < narrow[name].value < high
        assert wide[name].interval.low < low and wide[name].interval.high > high


def test_a_curve_that_never_bends_is_not_identifiable():
    by = found(study(lambda b: 1e6 / b, sizes=(2, 8, 32)))
    assert by["law"].value is None and ": > " in by["law"].note
    assert "up to B = 32" in by["linear_20"].note and str(by["linear_20"]) == "> 32"


def test_a_bound_of_the_end_is_its_lower_limit():
    # A K* that may be 50 % less hides an end before the largest batch size.
    noisy = found(study(lambda b: 1e6 / b, sizes=(2, 8, 32), spread=(1.0, 1.5, 2.0, 3.0)))
    assert 2 < noisy["linear_20"].bound < noisy["linear_50"].bound <= 32
    assert "up to B = 32" in noisy["linear_20"].note


def test_a_curve_that_begins_beyond_linear_scaling_says_so(golden):
    analysis = study(sizes=(512, 2048, 8192))
    assert numbers_in(found(analysis)["law"].note) == [512]
    text = critical_text(analysis)
    *_, row, footnote = text.splitlines()
    assert row.count("] *") == 4 and footnote.startswith("* ")
    golden.check("analysis/critical-beyond.txt", text)
    by = found(study(sizes=(128, 512, 2048)))
    assert numbers_in(by["linear_20"].note) == [128, 64]


def test_theory_noise_scale_and_noise_law_of_known_terms():
    """Noise 50 everywhere, |grad|^2 falling from 4 to 1: tr(Sigma) / |G|^2 = 20, M + sigma^2 / eps
    = 50."""

    def keep(b, steps):
        kept = theory_terms(
            steps,
            beta=50.0,
            lipschitz=(2.0,) * 12,
            squared=np.linspace(4, 1, 12),
            first=4,
            rate=0.1,
        )
        kept["readings"]["lipschitz"]["noise"] = [50.0] * 12
        return kept

    by = found(study(keep=keep))
    assert by["noise_scale"].value == pytest.approx(20)
    assert by["noise_law"].value == pytest.approx(50)
    assert by["theory"].value == pytest.approx(0.1 * 2.0 * 50.0 / 2.5)  # eta L beta / (mu epsilon)
    assert by["theory"].interval == pytest.approx((4.0, 4.0))


@pytest.mark.parametrize("decays", [False, True])
def test_what_was_measured_beyond_the_goal_counts_in_none_of_them(decays):
    """Noise 2 + 3 |grad|^2, |grad|^2 = 100 / step; M + sigma^2 / eps is 3 + 2 K / 100 at the
    goal."""

    def keep(b, steps, ran=1):
        at = np.linspace(steps / 8, ran * steps, 8 * ran)
        kept = theory_terms(
            ran * steps, lipschitz=(2.0,) * len(at), squared=100 / at, first=2.5, at=at
        )
        kept["readings"]["lipschitz"]["noise"] = (2 + 300 / at).tolist()
        if decays and ran > 1:
            kept["flags"]["theory/rate_square_sum"] *= 2
        return kept

    whole = found(study(keep=lambda b, steps: keep(b, steps, ran=4)))
    to_goal = found(study(keep=keep))
    for name in ("noise_scale", "noise_law"):
        assert whole[name].value == pytest.approx(to_goal[name].value)
        assert whole[name].interval == pytest.approx(to_goal[name].interval)
    assert to_goal["noise_law"].value == pytest.approx(
        math.exp(np.mean([math.log(3 + round(LAW.steps(b)) / 50) for b in SIZES]))
    )
    assert whole["theory"].value == (None if decays else pytest.approx(to_goal["theory"].value))


def test_table_report_and_notebook(tmp_path, golden):
    analysis = study()
    table = analysis.critical_table
    assert list(table["definition"]) == list(DEFINITIONS)
    assert Study(analysis.record).critical.equals(table)
    text = critical_text(analysis)
    assert text in render(analysis)
    golden.check("analysis/critical.txt", text)
    assert "critical.csv" in {path.name for path in write_all(analysis, tmp_path)[0]}


def test_nothing_finished_is_no_section():
    empty = analysis_of({Cell(4): [], Cell(8): [result(Cell(8), 0, None)]}, space={})
    assert critical_text(empty) == ""
    assert set(empty.critical_table["verdict"]) == {
        "K is known at no batch size; 3 are needed",
        "needs K* at 3 batch sizes; the series has 0",
        "not measured",
    }


def test_on_the_noisy_quadratic_they_are_of_one_order():
    """Exact K* of SGD: the law's B_crit against what is read off without a law."""
    model, rates = NoisyQuadraticModel(1000), np.geomspace(1e-3, 1.99, 200)
    steps = {b: model.k_star(0.05, b, rates) for b in (1, 4, 16, 64, 256, 1024, 4096)}
    by = found(study(steps.__getitem__, sizes=tuple(steps)))
    critical = by["law"].value
    assert by["linear_20"].value < by["linear_50"].value < critical
    assert 0.2 * critical / 3 < by["linear_20"].value < 0.2 * critical * 3
    assert 0.5 * critical / 3 < by["linear_50"].value < 0.5 * critical * 3


@pytest.mark.parametrize("resolved", [True, False])
def test_the_noise_scale_before_a_study_is_in_the_table_where_trials_measured_none(resolved):
    high = 160.0 if resolved else math.inf
    noise = NoiseScale(0.5, 0.1, 15.5, 2.0, 21.0, high, 64, 32)
    record = analysis_of(
        {
            Cell(b, s): [result(Cell(b, s), 0, round(LAW.steps(b)))]
            for b in SIZES
            for s in (0.0, 0.9)
        },
        space={},
        goal=GOAL,
    ).record
    table = Analysis(dataclasses.replace(record, noise=noise)).critical_batch_sizes
    dense, sparse = table[Series(0.0)]["noise_scale"], table[Series(0.9)]["noise_scale"]
    if resolved:
        assert (dense.value, dense.interval, dense.bound) == (31.0, (21.0, 160.0), None)
    else:
        assert (dense.value, dense.bound) == (None, 21.0)
    assert numbers_in(dense.note)[-2:] == [64, 32]
    assert (sparse.value, sparse.bound) == (None, None)
    assert str(noise) in sparse.note


def test_the_noise_scale_before_a_study_is_in_the_row_of_the_network_that_it_trained():
    """The study had a width of 64 alone, then 32 too. Masks and workers do not change the run."""
    cells = {}
    for width in (32, 64):
        for steps in (1, 4):
            axes = (("local.steps", steps), ("model.width", width))
            cells |= {Cell(b, 0.0, axes): [result(Cell(b, 0.0, axes), 0, 40)] for b in (4, 16)}
    grown = {"local.steps": [1, 4], "model.width": [32, 64]}
    record = analysis_of(cells, space={}, goal=GOAL, axes=grown).record
    values = []
    for axes in ({"model.width": 64}, {"model.width": 64, "local.steps": 1}, None):
        noise = NoiseScale(0.5, 0.1, 15.5, 2.0, 21.0, 60.0, 64, 32, axes=axes)
        table = Analysis(dataclasses.replace(record, noise=noise)).critical_batch_sizes
        values.append([table[series]["noise_scale"].value for series in record.series])
    series = [dict(each.axes) for each in record.series]
    of_wide = [31.0 if axes["model.width"] == 64 else None for axes in series]
    # An earlier version did not store the axes, so it is of the first series.
    first = [31.0 if each == min(record.series) else None for each in record.series]
    assert values == [of_wide, of_wide, first]
