"""The paper's claims on where in the search space trials succeed."""

import math

import numpy as np
import pytest

from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.replication.region import (
    Predictions,
    _mean_kappa,
    best_range,
    binomial_interval,
    cohens_kappa,
    effective_rate_kappa,
    predict_each,
    rate_range_ratio,
    share_inside,
)
from lit_dps.replication.rules import Verdict
from tests.support.claims import judged
from tests.support.fake_study import analysis_of, result

SEEN, NOT_SEEN, UNDECIDABLE = Verdict
RATE = {"model.learning_rate": Range(1e-4, 1.0, "log")}
SGD = {"model": {"init_args": {"optimizer": "sgd"}}}
BOTH = RATE | {"model.momentum": Range(0.0, 0.999, "reverse_log")}


def test_the_exact_interval_of_a_share():
    # Clopper and Pearson: none of n has the upper limit 1 - 0.025^(1/n).
    assert binomial_interval(0, 10) == pytest.approx((0, 1 - 0.025**0.1))
    assert binomial_interval(10, 10) == pytest.approx((0.025**0.1, 1))
    # 8 of 10, from tables.
    assert binomial_interval(8, 10) == pytest.approx((0.4439, 0.9748), abs=1e-4)


def best_at(rates, points=None):
    """A cell for each rate, whose best trial has it, of a point; the other trials are slower."""
    cells = {}
    for i, rate in enumerate(rates):
        cell = Cell(2**i, 0.0)
        point = points[i] if points else i
        cells[cell] = [
            result(cell, point, 160, params={"model.learning_rate": rate}),
            result(cell, 99, 320, params={"model.learning_rate": 0.01}),
        ]
    return analysis_of(cells, space=RATE)


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ([0.01] * 10, SEEN),
        ([0.01] * 5 + [1.0] * 5, UNDECIDABLE),
        ([1.0] * 10, NOT_SEEN),
    ],
)
def test_best_points_inside(rates, verdict):
    assert judged("best-points-inside", best_at(rates)).verdict is verdict


def test_a_point_that_is_best_in_several_cells_counts_once():
    study = best_at([0.01, 0.01, 0.01, 1.0, 0.1, 0.2], points=[0, 0, 0, 1, 2, 3])
    number = share_inside(study)[""].number
    assert number.value == 0.75
    assert number.interval == pytest.approx(binomial_interval(3, 4))


def test_best_points_count_over_all_cells():
    measured = share_inside(best_at([0.01, 0.02, 0.03, 1e-4]))[""]
    assert measured.number.value == 0.75
    assert share_inside(best_at([0.01] * 3))[""].number is None
    assert (
        share_inside(analysis_of({Cell(2, 0.0): [result(Cell(2, 0.0), 0, 16)]}, space={})) is None
    )


def succeeding(ranges, steps=160, **kw):
    """25 rates a cell, log10 from -4 to 0 in sixths; complete in a range by (B, S)."""
    cells = {}
    for key, (low, high) in ranges.items():
        cell = Cell(*key)
        cells[cell] = []
        for point in range(25):
            log_rate = -4 + point / 6
            inside = low <= log_rate <= high
            params = {"model.learning_rate": 10**log_rate}
            cells[cell].append(result(cell, point, steps if inside else None, params=params))
    return analysis_of(cells, space=RATE, config=SGD, **kw)


def test_the_range_of_rates_is_compared_in_decades():
    study = succeeding({(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -1.99)})
    measured = rate_range_ratio(study)[""]
    # Complete from -3 to -1, and from -3 to -2; the next rates are 1/6 further at both ends.
    assert measured.number.value == pytest.approx((1 + 1 / 6) / (2 + 1 / 6))
    assert measured.number.interval == pytest.approx((1 / (2 + 1 / 3), (1 + 1 / 3) / 2))
    assert judged("range-shrinks", study).verdict is SEEN
    same = succeeding({(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -0.99)})
    assert judged("range-shrinks", same).verdict is UNDECIDABLE
    wider = succeeding({(8, 0.0): (-3.01, -1.99), (8, 0.9): (-3.01, -0.99)})
    assert judged("range-shrinks", wider).verdict is NOT_SEEN


def test_a_range_of_few_rates_is_not_known():
    # 3 and 4 complete rates.
    few = succeeding({(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -2.6)})
    assert rate_range_ratio(few)[""].number is None
    enough = succeeding({(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -2.49)})
    assert rate_range_ratio(enough)[""].number.value == pytest.approx((3 / 6 + 1 / 6) / (2 + 1 / 6))


def test_a_limit_beyond_the_budget_shows_no_range():
    ranges = {(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -1.99)}
    # Twice K* is 40,320 steps, the budget 40,000.
    assert rate_range_ratio(succeeding(ranges, steps=20_160, race_factor=2.0))[""].number is None
    known = rate_range_ratio(succeeding(ranges, steps=20_000, race_factor=2.0))[""]
    assert known.number is not None


def test_a_range_that_ends_with_the_search_space_is_not_known():
    study = succeeding({(8, 0.0): (-3.01, 0), (8, 0.9): (-3.01, -1.99)})
    assert rate_range_ratio(study)[""].number is None


def test_a_race_at_twice_the_fewest_steps_shows_the_range_within_them():
    ranges = {(8, 0.0): (-3.01, -0.99), (8, 0.9): (-3.01, -1.99)}
    assert rate_range_ratio(succeeding(ranges, race_factor=1.0)) is None
    measured = rate_range_ratio(succeeding(ranges, race_factor=2.0))[""]
    assert measured.number.value == pytest.approx((1 + 1 / 6) / (2 + 1 / 6))
    # Completed later than the factor allows: outside.
    slow = succeeding(ranges)
    cell = Cell(8, 0.0)
    results = list(slow.record.results[cell])
    assert results[6].steps == 160  # at 10^-3
    params = {"model.learning_rate": 1e-3}
    results[6] = result(cell, 6, 640, params=params)
    cells = {**slow.record.results, cell: results}
    raced = analysis_of(cells, space=RATE, config=SGD, race_factor=2.0)
    # The dense range begins at 10^(-3 + 1/6) now.
    assert rate_range_ratio(raced)[""].number.value == pytest.approx((1 + 1 / 6) / 2)


def test_the_best_range_has_the_fewest_errors():
    rates = np.array([1.0, 0.01, 0.1, 10.0, 100.0])
    is_complete = np.array([True, False, True, True, False])
    low, high = best_range(rates, is_complete)
    assert (low, high) == pytest.approx((math.sqrt(0.001), math.sqrt(1000)))
    # An error inside costs less than the complete trial beyond it gains.
    low, high = best_range(rates, np.array([True, True, False, True, False]))
    assert low == 0 and high == pytest.approx(math.sqrt(1000))


def test_each_trial_is_predicted_by_the_others():
    rates = np.array([0.01, 0.2, 1.0, 10.0, 100.0])
    is_complete = np.array([False, True, True, True, False])
    # Without one of the ends the range has no end there.
    assert predict_each(rates, is_complete) == [True, True, True, True, True]
    assert predict_each(np.geomspace(1e-6, 1, 7), np.array([0, 0, 1, 1, 1, 0, 0], bool))[::6] == [
        False,
        False,
    ]


def test_cohens_kappa():
    # 20 and 15 agreements of 50, 10 and 5 disagreements: (0.7 - 0.5) / (1 - 0.5).
    truth = np.array([1] * 25 + [0] * 25, bool)
    guess = np.array([1] * 20 + [0] * 5 + [1] * 10 + [0] * 15, bool)
    equal = np.ones((1, 50))
    assert cohens_kappa(truth, guess, equal)[0] == pytest.approx(0.4)
    assert cohens_kappa(truth, ~truth, equal)[0] == pytest.approx(-1)
    # A weight of 2 is a trial that counts twice; without the 15 disagreements all is right.
    right = truth == guess
    assert cohens_kappa(truth, guess, right[None].astype(float))[0] == pytest.approx(1)
    twice = np.concatenate([truth, truth[:20]]), np.concatenate([guess, guess[:20]])
    weights = np.ones((1, 50))
    weights[0, :20] = 2
    assert cohens_kappa(truth, guess, weights)[0] == pytest.approx(
        cohens_kappa(*twice, np.ones((1, 70)))[0]
    )


def divided(by_effective_rate, **kw):
    """Trials that are complete by their effective rate, or by luck."""
    cells = {}
    random = np.random.default_rng(0)
    for batch_size in (8, 16):
        cell = Cell(batch_size, 0.0)
        cells[cell] = []
        for point in range(40):
            log_rate, log_rest = random.uniform(-4, 0), random.uniform(-3, 0)
            inside = random.random() < 0.5
            if by_effective_rate:
                inside = -1.5 < log_rate - log_rest < 0.5
            params = {"model.learning_rate": 10**log_rate, "model.momentum": 1 - 10**log_rest}
            cells[cell].append(result(cell, point, 160 if inside else None, params=params))
    return analysis_of(cells, space=BOTH, **kw)


def test_the_effective_rate_divides():
    assert judged("line-divides", divided(True)).verdict is SEEN
    assert judged("line-divides", divided(False)).verdict is NOT_SEEN
    assert effective_rate_kappa(divided(True))["S=0"].number.value > 0.85


def test_predictions_that_are_all_right_have_the_limit_of_a_share():
    points = np.arange(10)
    truth = points < 5
    number = _mean_kappa([Predictions(points, truth, truth)] * 2)
    # 0.025^(1/10) is the lower limit of 10 of 10; half are right by chance.
    assert number.value == 1 and number.interval.high == 1
    assert number.interval.low == pytest.approx((0.025**0.1 - 0.5) / 0.5)


def test_trials_of_a_point_are_resampled_together():
    points = np.arange(10)
    truth = points < 5
    guess = truth.copy()
    guess[[0, 9]] = ~guess[[0, 9]]
    one = _mean_kappa([Predictions(points, truth, guess)])
    assert one.value == pytest.approx(0.6)
    # The same trials at a second batch size add no evidence.
    assert _mean_kappa([Predictions(points, truth, guess)] * 2).interval == one.interval


def test_the_effective_rate_needs_momentum_and_no_race():
    assert effective_rate_kappa(best_at([0.01] * 4)) is None
    assert effective_rate_kappa(divided(True, race_factor=2.0)) is None
