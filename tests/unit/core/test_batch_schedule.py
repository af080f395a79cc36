"""The batch size as a function of the step: sizes and counted examples, by hand."""

from itertools import islice

import pytest

from lit_dps.core.batch_schedule import CONSTANT_BATCH, BatchSchedule, schedule_named
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import BatchConfig


def sizes(name, options, batch_size, count):
    return list(islice(schedule_named(name, options).sizes(batch_size), count))


@pytest.mark.parametrize(
    "name, options, batch_size, expected",
    [
        ("constant", {}, 8, [8, 8, 8]),
        ("linear", {"start": 0.25, "steps": 3}, 8, [2, 4, 6, 8, 8]),
        # After 0, 2, 5, 9 and 15 of 12 examples: 8 (1/4 + 3/4 e/12) = 2, 3, 4.5, 6.5, 8.
        ("linear", {"start": 0.25, "examples": 12}, 8, [2, 3, 4, 6, 8, 8]),
        ("linear", {"start": 1, "steps": 3}, 8, [8, 8]),
        ("doubling", {"start": 0.25, "steps": 2}, 16, [4, 4, 8, 8, 16, 16, 16]),
        # Doublings after 8 and 16 examples.
        ("doubling", {"start": 0.25, "examples": 8}, 16, [4, 4, 8, 16]),
        # 0.3 x 10 is 3, though 0.3 is no number of base 2. 0.3, 0.6 and 1.2 of 10.
        ("doubling", {"start": 0.3, "steps": 1}, 10, [3, 6, 10, 10]),
        ("doubling", {"start": 0.1, "steps": 1}, 2, [1, 1, 1, 1, 2]),
        ("late", {"start": 0.25, "steps": 5, "share": 0.6}, 8, [2, 2, 2, 8, 8, 8]),
        # The switch is at the first step after 8 of 10 examples.
        ("late", {"start": 0.25, "examples": 10}, 8, [2, 2, 2, 2, 8, 8]),
        # 10 % and 30 % of 20 steps.
        ("0:B/4 10%:B/2 30%:B", {"steps": 20}, 8, [2, 2, 4, 4, 4, 4, 8, 8]),
        # 25 % and 62.5 % of 16 examples: 4 and 10. The option of another schedule has no effect.
        ("0%:B/3 25%:B/2 62.5%:B", {"examples": 16, "start": 0.5}, 6, [2, 2, 3, 3, 6, 6]),
        # The cosine to 0.1 of 12 steps is 1, .985, .940, .868, .775, .666, .55, .434, .325, .232,
        # .160, .115, .1: a half after 7 steps and a quarter after 9; an eighth after 11.
        ("seesaw", {"start": 0.25, "steps": 12}, 8, [2] * 7 + [4] * 2 + [8] * 5),
    ],
)
def test_sizes_of_steps(name, options, batch_size, expected):
    assert sizes(name, options, batch_size, len(expected)) == expected


def test_examples_are_the_sum_of_the_sizes():
    schedule = schedule_named("linear", {"start": 0.25, "steps": 3})  # 2, 4, 6, 8, 8, ...
    assert [schedule.examples_of(steps, 8) for steps in (0, 1, 2, 3, 4, 5)] == [0, 2, 6, 12, 20, 28]
    assert schedule.examples_of(2.5, 8) == 9
    # The most steps within a number of examples.
    assert [schedule.steps_within(e, 8) for e in (0, 1, 2, 11, 12, 27, 28, 100)] == [
        *(0, 0, 1, 2, 3, 4, 5, 14)
    ]
    assert CONSTANT_BATCH.examples_of(3, 8) == 24
    assert CONSTANT_BATCH.steps_within(31, 8) == 3


class Halving(BatchSchedule):
    def size(self, step, examples, batch_size):
        return batch_size >> step


@pytest.mark.parametrize(
    "options, key",
    [
        ({"start": 0, "steps": 3}, "batch.options.start"),
        ({"start": 1.5, "steps": 3}, "batch.options.start"),
        ({"start": 0.5}, "batch.options"),
        ({"start": 0.5, "steps": 3, "examples": 3}, "batch.options"),
        ({"start": 0.5, "steps": 2.5}, "batch.options.steps"),
        ({"start": 0.5, "examples": 0}, "batch.options.examples"),
        ({"start": 0.5, "stops": 3}, "batch.options.stops"),
    ],
)
def test_options_that_are_refused(options, key):
    with pytest.raises(ConfigError) as raised:
        BatchConfig("linear", options)
    assert raised.value.key == key


@pytest.mark.parametrize(
    "name",
    [
        "0:B/4",
        "3%:B",
        "0:B/2 0%:B",
        "0:B/4 30%:B/2 10%:B",
        "0:B/4 100%:B",
        "0:B/4 5:B",
        "0:B/0 1%:B",
    ],
)
def test_stages_that_are_refused(name):
    with pytest.raises(ConfigError) as raised:
        BatchConfig(name, {"steps": 100})
    assert raised.value.key == "batch.schedule"


@pytest.mark.parametrize(
    "name, options, key",
    [
        ("late", {"start": 0.5, "steps": 3, "share": 1.0}, "batch.options.share"),
        ("seesaw", {"start": 0.5, "steps": 3, "end": 0}, "batch.options.end"),
        ("0:B/4 50%:B", {"steps": 3, "strat": 0.5}, "batch.options.strat"),
    ],
)
def test_options_of_one_schedule_that_are_refused(name, options, key):
    with pytest.raises(ConfigError) as raised:
        BatchConfig(name, options)
    assert raised.value.key == key


def factors(name, options, rule, batch_size, count):
    config = BatchConfig(name, options, rule)
    of_cell = config.rate_factors(batch_size)
    return [of_cell.at(step) for step in range(count)]


def test_the_rate_follows_the_size_of_each_step():
    options = {"start": 0.25, "steps": 1}
    # Sizes 2, 4, 8, 8.
    assert factors("doubling", options, "none", 8, 4) == [1, 1, 1, 1]
    assert factors("doubling", options, "linear", 8, 4) == [0.25, 0.5, 1, 1]
    assert factors("doubling", options, "sqrt", 8, 4) == pytest.approx([0.5, 0.5**0.5, 1, 1])
    down = [1, 0.5**0.5, 0.5, 0.5]
    assert factors("doubling", options, "inverse_sqrt", 8, 4) == pytest.approx(down)
    # A size that is rounded down has the factor of the size: 3 of 10, 6 of 10.
    rounded = {"start": 0.34, "steps": 1}
    assert factors("doubling", rounded, "linear", 10, 3) == [0.3, 0.6, 1]
    assert factors("constant", None, "sqrt", 8, 2) == [1, 1]
    with pytest.raises(ConfigError) as raised:
        BatchConfig("doubling", options, "root")
    assert raised.value.key == "batch.rate"


def test_seesaw_halves_the_rate_where_the_batch_cannot_double():
    options = {"start": 0.5, "steps": 12}
    # Halvings after 7, 9 and 11 steps, of which the batch doubles at the first.
    of_sgd = [1.0] * 9 + [0.5] * 2 + [0.25] * 2
    assert factors("seesaw", options, "none", 8, 13) == of_sgd
    of_adam = [1.0] * 7 + [0.5**0.5] * 2 + [0.5**1.5] * 2 + [0.5**2.5] * 2
    assert factors("seesaw", options, "inverse_sqrt", 8, 13) == pytest.approx(of_adam)


def test_an_option_that_is_missing_is_named():
    with pytest.raises(ConfigError) as raised:
        BatchConfig("doubling", {"steps": 3})
    assert raised.value.key == "batch.options"
    assert raised.value.value == {"steps": 3}
    assert "start" in raised.value.allowed and "doubling" in raised.value.allowed


def test_a_size_of_a_user_is_between_one_and_the_batch_size():
    sizes = Halving().sizes(2)
    assert [next(sizes), next(sizes)] == [2, 1]
    with pytest.raises(ConfigError) as raised:
        next(sizes)
    assert raised.value.key == "batch.schedule"


def test_a_cell_sets_the_schedule_and_its_options():
    config = BatchConfig(options={"start": 0.5, "steps": 4})
    axes = (("batch.options.steps", 1), ("batch.schedule", "doubling"), ("optim.delay", 2))
    of_cell = config.with_axes(axes)
    assert of_cell == BatchConfig("doubling", {"start": 0.5, "steps": 1})
    assert list(islice(of_cell.build().sizes(4), 3)) == [2, 4, 4]


def test_seesaw_needs_a_batch_that_can_double_to_the_size_of_the_cell():
    options = {"start": 0.25, "steps": 12}
    for rule in ("none", "inverse_sqrt"):
        with pytest.raises(ConfigError) as raised:
            factors("seesaw", options, rule, 3, 1)
        assert (raised.value.key, raised.value.value) == ("batch.options.start", 0.25)
        assert "B = 3 must be at least 4" in raised.value.allowed
    assert factors("seesaw", options, "inverse_sqrt", 4, 8)[-1] == pytest.approx(0.5**0.5)
    # Whether a schedule changes the rate at all is known without a size.
    assert not BatchConfig("seesaw", options, "inverse_sqrt").rate_factors(1).are_one
