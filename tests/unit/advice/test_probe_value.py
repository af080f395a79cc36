"""What a further run is worth: the expected fall of the time that the recommendation loses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dps.advice.probe_value import Worth, best_run, worth_of_runs


class TwoWorlds:
    """A law with two equally likely curves: all that a larger batch saves, or nothing."""

    reach = (1.0, 1000.0)

    def samples(self, batch_sizes):
        batch = np.asarray(batch_sizes, float)
        perfect = 3200 / batch
        flat = np.full_like(batch, 100.0)
        return np.array([perfect, flat] * 50)


def constant(batch_size: float) -> float:
    return 1.0


def linear(batch_size: float) -> float:
    return batch_size / 32


def test_a_run_that_tells_the_worlds_apart_is_worth_the_whole_loss():
    # Step time grows with B: B = 128 takes a quarter of the time in one world, 4 times in the other.
    def half_full(batch_size: float) -> float:
        return (batch_size / 32) ** 0.5

    (worth,) = worth_of_runs(TwoWorlds(), [128], [32, 128], {1: half_full}, half_full)
    # Times: perfect 100, 50; flat 100, 200. The losses are 1 and 0, or 0 and 1: either choice loses
    # 0.5 on average, and after the run nothing.
    assert worth.value == pytest.approx(0.5, rel=1e-6)
    assert worth.steps == pytest.approx((25 + 100) / 2)
    assert worth.cost == pytest.approx(62.5 * 2)


@pytest.mark.parametrize("seconds", [constant, linear])
def test_a_run_that_cannot_change_the_recommendation_is_worth_nothing(seconds):
    # With a constant step time the largest batch is best in both worlds; with a linear one the
    # smallest.
    (worth,) = worth_of_runs(TwoWorlds(), [128], [32, 128], {1: seconds}, seconds)
    assert worth.value == pytest.approx(0.0, abs=1e-12)
    assert best_run([worth], math.inf) is None


def test_batch_sizes_beyond_reach_and_devices_without_step_times_do_not_count():
    def unknown(batch_size: float) -> float:
        return math.inf

    assert worth_of_runs(TwoWorlds(), [2000], [32, 128], {1: constant}, constant) == []
    assert worth_of_runs(TwoWorlds(), [128], [32, 128], {2: unknown}, constant) == []
    both = worth_of_runs(TwoWorlds(), [128], [32, 128], {1: linear, 2: unknown}, linear)
    assert len(both) == 1


def test_the_most_value_per_second_that_the_time_pays_is_run():
    cheap, dear = Worth(64, 10, 5.0, 0.05), Worth(256, 10, 50.0, 0.2)
    assert best_run([cheap, dear], 100.0) == cheap
    assert best_run([dear, cheap], 20.0) == cheap
    assert best_run([Worth(64, 10, 5.0, 0.001)], 100.0) is None
