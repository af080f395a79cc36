"""The factor of the initial learning rate by step, against the authors' formula."""

import pytest

from lit_dps.optim import RateSchedule


def factor(name: str, step: int, decay_steps: int, end_factor: float) -> float:
    return RateSchedule(name, decay_steps, end_factor).factor(step)


def authors_rate(initial: float, end: float, step: int, decay_steps: int) -> float:
    """tf.train.polynomial_decay with power 1, as their optimizer.py calls it."""
    return (initial - end) * (1 - min(step, decay_steps) / decay_steps) + end


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1.0),
        (250, 0.7525),
        (500, 0.505),
        (750, 0.2575),
        (999, 0.01099),
        (1000, 0.01),
        (1001, 0.01),
        (10**6, 0.01),
    ],
)
def test_linear_falls_from_one_to_the_end_factor_and_stays(step, expected):
    assert factor("linear", step, 1000, 0.01) == pytest.approx(expected, rel=1e-12)


def test_the_ends_of_linear_are_exact():
    assert factor("linear", 0, 40_000, 0.01) == 1.0
    assert factor("linear", 40_000, 40_000, 0.01) == 0.01
    assert factor("linear", 10, 10, 0.0) == 0.0


@pytest.mark.parametrize("end_factor", [0.0, 1e-3, 0.5, 1.0])
@pytest.mark.parametrize("decay_steps", [1, 7, 40_000])
def test_linear_times_the_rate_is_the_authors_formula(end_factor, decay_steps):
    initial = 0.37
    for step in {
        0,
        1,
        decay_steps // 2,
        decay_steps - 1,
        decay_steps,
        decay_steps + 1,
        3 * decay_steps,
    }:
        theirs = authors_rate(initial, end_factor * initial, step, decay_steps)
        # both are a few float64 operations on numbers below 1
        assert initial * factor("linear", step, decay_steps, end_factor) == pytest.approx(
            theirs, rel=1e-12, abs=1e-16
        )


def test_an_end_factor_of_one_is_constant_and_constant_ignores_the_rest():
    assert {factor("linear", step, 5, 1.0) for step in range(9)} == {1.0}
    assert {factor("constant", step, 5, 0.01) for step in (0, 3, 5, 10**6)} == {1.0}
