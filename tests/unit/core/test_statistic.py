"""The statistic that K* is: values by hand, and a race that never changes them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lit_dps.analysis.observations import noise_of_k_star
from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.racing import best_trial, truncate_at_race_limit
from lit_dps.core.statistic import (
    MINIMUM,
    BestTrials,
    Statistic,
    median_of_best,
    statistic_named,
)
from lit_dps.core.trial import Cell
from lit_dps.core.unit import SECONDS
from tests.support.errors import refuses
from tests.support.fake_study import result

SPACE = {"model.learning_rate": {"low": 1e-3, "high": 1.0, "scale": "log"}}
CELL = Cell(16)


class GeometricMeanOfBestTwo(Statistic):
    """A class of a user's file."""

    def value(self, steps):
        best = sorted(k for k in steps if k is not None)[:2]
        return math.sqrt(best[0] * best[1]) if len(best) == 2 else None

    def race_limit(self, steps, factor):
        best = sorted(k for k in steps if k is not None)[:2]
        return factor * best[1] if len(best) == 2 else math.inf


class WithoutRace(GeometricMeanOfBestTwo):
    race_limit = Statistic.race_limit


class MeanOfAll(Statistic):
    def value(self, steps):
        complete = [k for k in steps if k is not None]
        return sum(complete) / len(complete) if complete else None


class RacesToBest(GeometricMeanOfBestTwo):
    def race_limit(self, steps, factor):
        return min((factor * k for k in steps if k is not None), default=math.inf)


class First(Statistic):
    def value(self, steps):
        return steps[0]


class MeanOfBestTwoInWholeSteps(Statistic):
    def value(self, steps):
        complete = sorted(k for k in steps if k is not None)
        if len(complete) < 2:
            return None
        return math.ceil((complete[0] + complete[1]) / 2)


class NeverKnown(Statistic):
    def value(self, steps):
        return None


HERE = "tests.unit.core.test_statistic"
STATISTICS = [
    MINIMUM,
    *map(median_of_best, (1, 2, 3, 4, 5)),
    BestTrials((1 / 3, 1 / 3, 1 / 3), "mean_of_best_3", "the mean of the best 3"),
    statistic_named(f"{HERE}.GeometricMeanOfBestTwo"),
    statistic_named(f"{HERE}.WithoutRace"),
]


@pytest.mark.parametrize(
    "name, steps, expected",
    [
        ("minimum", [64, None, 16, 32], 16),
        ("minimum", [None, None], None),
        ("minimum", [], None),
        ("median_of_best_3", [64, None, 16, 32, 48], 32),
        ("median_of_best_3", [64, None, 16], 64),
        ("median_of_best_3", [16, None, None], None),
        ("median_of_best_1", [64, 16], 16),
        ("median_of_best_2", [64, 16, 32], 24),
        ("median_of_best_4", [64, 16, 33, 16], 25),
        ("median_of_best_4", [64, 16, None, None], None),
        ("median_of_best_5", [5, 4, 3, 2, 1, None], 3),
        (f"{HERE}.GeometricMeanOfBestTwo", [100, 10, 20], 15),
        (f"{HERE}.GeometricMeanOfBestTwo", [9, 4], 6),
    ],
)
def test_k_star_is_the_value_in_whole_steps(name, steps, expected):
    statistic = statistic_named(name)
    assert statistic.k_star(steps) == expected
    draws = np.array([[math.inf if k is None else k for k in steps]] * 2, float)
    if steps:
        value = statistic.value(steps)
        assert statistic.of_draws(draws) == pytest.approx([value or math.inf] * 2)


def test_draws_of_whole_steps_may_be_missing_and_are_as_noisy_as_others():
    """The first draw decides the type of a numpy array of all draws."""
    statistic = statistic_named(f"{HERE}.MeanOfBestTwoInWholeSteps")
    costs = np.array([[10, 13, math.inf], [10, math.inf, math.inf], [10, 16, 16]])
    assert statistic.of_draws(costs).tolist() == [12, math.inf, 13]
    steps = [100, 110, 125, 130, *[None] * 21]
    # The same draws, seeded by the name.
    exact = BestTrials((0.5, 0.5), statistic.name, "the mean of the best 2")
    noise = noise_of_k_star(steps, 2, exact)
    assert noise_of_k_star(steps, 2, statistic) == pytest.approx(noise, rel=0.02)


@pytest.mark.parametrize("statistic", STATISTICS, ids=lambda statistic: statistic.name)
def test_no_race_changes_the_value(statistic):
    """Of all cells of up to six trials, and all trials that may have ended before the others."""
    for count in range(1, 7):
        for steps in itertools.combinations_with_replacement([1, 2, 3, 5, None], count):
            value = statistic.value(steps)
            for first in itertools.product([False, True], repeat=count):
                ended = list(itertools.compress(steps, first))
                limit = statistic.race_limit(ended, 1.0)
                assert statistic.race_limit(ended, 2.0) == 2 * limit
                raced = [k if k is not None and k <= limit else None for k in steps]
                assert statistic.value(raced) == value, (steps, ended)


@pytest.mark.parametrize("factor", [1, 1.5, 2])
@pytest.mark.parametrize("statistic", STATISTICS[:5], ids=lambda statistic: statistic.name)
def test_truncated_results_have_the_k_star_of_all(statistic, factor):
    rng = np.random.default_rng(0)
    for _ in range(50):
        full = []
        for point, k in enumerate(rng.integers(1, 12, 8).tolist()):
            steps = 16 * k if k < 10 else None
            curve = {"step": list(range(16, 16 * k + 1, 16))}
            full.append(result(CELL, point, steps, curve=curve))
        raced = truncate_at_race_limit(full, factor, statistic)
        k_star = statistic.k_star(r.steps for r in full)
        assert statistic.k_star(r.steps for r in raced) == k_star
        assert best_trial(raced, statistic) == best_trial(full, statistic)


def test_the_trial_of_k_star_is_the_first_that_needs_as_many_steps():
    complete = [(64, 0), (16, 1), (32, 3), (32, 2)]
    assert MINIMUM.ranking(complete) == [(16, 1), (32, 2), (32, 3), (64, 0)]
    assert median_of_best(3).ranking(complete) == [(32, 2), (16, 1), (32, 3), (64, 0)]
    assert median_of_best(2).ranking(complete) == [(32, 2), (16, 1), (32, 3), (64, 0)]
    assert median_of_best(3).ranking([(64, 0)]) == [] == MINIMUM.ranking([])
    results = [result(CELL, point, steps) for steps, point in complete]
    assert best_trial([*results, result(CELL, 9, None)], median_of_best(3)) == results[3]


@pytest.mark.parametrize(
    "name, needed",
    [("minimum", 1), ("median_of_best_3", 2), ("median_of_best_4", 3), ("median_of_best_9", 5)],
)
def test_a_study_has_as_many_trials_as_its_statistic_needs(name, needed):
    assert statistic_named(name).needed_trials == needed
    StudyConfig(space=SPACE, statistic=name, trials=needed).check()
    if needed > 1:
        with refuses("study.trials", needed - 1):
            StudyConfig(space=SPACE, statistic=name, trials=needed - 1).check()


@pytest.mark.parametrize(
    "name",
    ["median", "median_of_best_0", "mean_of_best_3", "math.inf", "no.module.Here", f"{HERE}.CELL"],
)
def test_a_name_without_a_statistic_is_refused(name):
    with refuses("study.statistic", name):
        StudyConfig(space=SPACE, statistic=name).check()


@pytest.mark.parametrize("kind", [MeanOfAll, NeverKnown], ids=lambda kind: kind.__name__)
def test_a_class_that_breaks_a_rule_is_refused(kind):
    with refuses("study.statistic", f"{HERE}.{kind.__name__}") as caught:
        statistic_named(f"{HERE}.{kind.__name__}")
    assert isinstance(caught.value, ConfigError)
    assert f"check_statistic({HERE}.{kind.__name__}())" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("InLines", "the seconds of the second best trial"),
        ("NamedByItself", "the seconds by tests.support.plug_ins.NamedByItself"),
    ],
)
def test_a_stored_statistic_is_read_whatever_its_description(name, words):
    statistic = statistic_named(f"tests.support.plug_ins.{name}")
    assert statistic.describe_in(SECONDS) == words
    assert statistic.value([8, None, 16]) == 16
