"""The law of K* of a study: from its trials, by series, with its verdict in words."""

import math

import numpy as np
import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.intervals import Interval, estimate
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.law_tables import law_rows
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.observations import AT_MOST, Observation
from lit_dps.analysis.tables import records, three_digits
from lit_dps.core.trial import Cell, Series
from lit_dps.storage.read import read_study
from tests.support.fake_study import result, write_study
from tests.support.texts import numbers_in


def law(steps, noise=0.05, **kw):
    """Return the law of K* by batch size."""
    return fit_law([Observation(b, k, noise) for b, k in steps.items()], **kw)


def on_the_law(c1, c2, batch):
    return {b: c1 / b + c2 for b in batch}


def test_intervals_hold_the_estimate_and_grow_with_the_noise():
    steps = on_the_law(4e4, 60, (4, 16, 64, 256, 1024))
    narrow, wide = law(steps), law(steps, noise=0.3)
    for fitted in (narrow, wide):
        assert fitted.c1_interval.low < fitted.fit.c1 < fitted.c1_interval.high
        assert fitted.c2_interval.low < fitted.fit.c2 < fitted.c2_interval.high
        sizes = np.array([4.0, 1024.0])
        low, high = fitted.band(sizes)
        assert (low < fitted.fit.steps(sizes)).all() and (high > fitted.fit.steps(sizes)).all()
    widths = [math.log(fit.c1_interval.high / fit.c1_interval.low) for fit in (wide, narrow)]
    assert widths[0] > 2 * widths[1]
    assert narrow == law(steps), "the same data give the same law"


def test_the_order_of_observations_does_not_matter():
    steps = on_the_law(4e4, 60, (10, 100, 1000))
    assert law(steps) == law(dict(reversed(steps.items())))


def test_identifiable_from_half_of_b_crit_on():
    seen = law(on_the_law(1e5, 100, (8, 64, 512)))  # B_crit = 1000
    assert seen.is_b_crit_known
    assert seen.describe() == f"B_crit = {estimate(1000, seen.b_crit_interval)}"
    intervals = (seen.c1_interval, seen.c2_interval, seen.b_crit_interval)
    assert (seen.c1, seen.c2, seen.critical) == intervals, "former names"
    short = law(on_the_law(1e5, 100, (8, 64, 480)))
    assert not short.is_b_crit_known and short.describes_k
    assert short.verdict.trust is Trust.PREDICTED
    assert short.verdict.bound == short.b_crit_interval.low < 1000
    assert short.describe().endswith(f"B_crit > {three_digits(short.b_crit_interval.low)}")


def test_a_table_has_no_b_crit_that_is_refused():
    seen = law(on_the_law(1e5, 100, (8, 64, 512)))
    short = law(on_the_law(1e5, 100, (8, 64, 480)))
    few = law({8: 100})
    rows = records(law_rows({Series(0.0): seen, Series(0.5): short, Series(0.9): few}))
    b_crit = [(row["b_crit"], row["b_crit_low"], row["b_crit_high"]) for row in rows]
    assert b_crit[0] == (seen.fit.critical_batch_size, *seen.b_crit_interval)
    assert b_crit[1:] == [(None, short.b_crit_interval.low, None), (None, None, None)]
    assert [row["c1"] for row in rows] == [seen.fit.c1, short.fit.c1, None]


def test_not_identifiable_where_c2_may_be_zero():
    perfect = law(on_the_law(1e5, 0, (8, 64, 512)))
    assert not perfect.is_b_crit_known
    assert 512 < perfect.verdict.bound < perfect.b_crit_interval.high
    # B_crit by the estimate well inside the data, but K are so noisy that there may be no floor.
    unsure = law({8: 1000, 64: 400, 512: 60}, noise=0.7)
    assert unsure.fit.critical_batch_size < 2 * 512
    low, high = unsure.b_crit_interval
    assert not unsure.is_b_crit_known and high > 100 * low


def test_too_few_batch_sizes_are_said_so():
    few = law({8: 100})
    assert few.fit is few.c1_interval is few.b_crit_interval is None and not few.is_b_crit_known
    assert few.verdict.trust is Trust.MEASURED and few.verdict.bound is None
    assert numbers_in(few.describe()) == [8, 3]  # one is a word
    bounds = [Observation(b, 16.0, bound=AT_MOST) for b in (64, 512)]
    assert numbers_in(fit_law([*few.observations, *bounds]).describe()) == [8, 2, 3]


def test_two_points_meet_any_law_and_give_none():
    two = law(on_the_law(1e5, 100, (8, 2048)))
    assert (
        two.fit is two.c1_interval is two.b_crit_interval is two.band(np.array([8.0])) is None
        and not two.is_b_crit_known
    )


def test_a_floor_reached_before_the_smallest_batch_is_said_so():
    floor = law(on_the_law(1e4, 300, (50, 100, 1600)))
    # What follows the interval says that B_crit is below the smallest batch size.
    assert floor.fit.critical_batch_size < 50
    assert floor.describe().partition("]")[2].startswith(", ")


def test_scaling_of_a_study_is_by_sparsity():
    storage = optuna.storages.InMemoryStorage()
    cells = {Cell(b, s): [] for b in (8, 64, 512) for s in (0.0, 0.9)}
    for cell in cells:
        c1, c2 = (1e5, 100) if cell.sparsity == 0 else (3e5, 200)
        cells[cell] = [
            result(cell, i, round(k * (c1 / cell.batch_size + c2)))
            for i, k in enumerate((1.2, 1, 1.1))
        ]
    cells[Cell(8, 0.9)] = [
        result(Cell(8, 0.9), 0, None),
        result(Cell(8, 0.9), 1, None, "infeasible"),
    ]
    write_study(storage, cells)
    dense, sparse = (
        Analysis(read_study(storage, "fake"), replicates=50).laws[Series(s)] for s in (0.0, 0.9)
    )
    assert dense.k_star == {8: 12600, 64: 1662, 512: 295}
    assert [dense.fit.c1, dense.fit.c2] == pytest.approx(
        [1e5, 100], rel=0.01
    )  # K* are rounded to whole steps
    assert sparse.k_star == {64: 4888, 512: 786}


def test_numbers_are_written_with_three_digits():
    numbers = (42363.9, 0.12345, 583.4, 7357.9, 4.2444e9, 99.96, math.inf)
    assert [three_digits(x) for x in numbers] == [
        "42400",
        "0.123",
        "583",
        "7360",
        "4.24e+09",
        "100",
        "inf",
    ]
    assert estimate(583.4, Interval(546.3, 638.1)) == f"583 {[546, 638]}"
    assert estimate(583.4, None) == "583"
