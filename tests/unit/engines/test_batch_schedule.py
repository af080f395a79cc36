"""A batch size that depends on the step: every loop trains the same steps on the same examples."""

from __future__ import annotations

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.trial_config import BatchConfig
from lit_dps.data import Digits
from lit_dps.data.loaders import interval_batches
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.parallel.process import Interrupted
from lit_dps.readings import BranchCallback, Reading, ReadingsCallback
from lit_dps.training import AdamScalingCallback, BatchScheduleCallback
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.example_count import SpentOfSteps
from lit_dps.training.stopwatch import Stopwatch
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.runs import engine as engine_of
from tests.support.runs import runs, train, train_one
from tests.support.scaled_loss import ScaledLoss
from tests.support.tiny import Plain, fit, loader
from tests.unit.engines.test_engine import PARAMS, WORKLOAD, quiet  # noqa: F401

GOAL = {"error": 0.001, "check_interval": 4, "max_steps": 20, "early_reject": True}
TRIAL = Trial(Cell(16, 0.5), 0, PARAMS)
# Steps of 4, 4, 4, 8, 8, 8, 16, 16, ... examples: the size changes within an interval.
DOUBLING = BatchConfig("doubling", {"start": 0.25, "steps": 3})
EXAMPLES = [3 * 4 + 8, 3 * 12 + 2 * 16, 3 * 12 + 6 * 16, 3 * 12 + 10 * 16, 3 * 12 + 14 * 16]
WAYS = {"single": {}, "lightning": {"lean": False}}


def plain(result):
    return dataclasses.replace(result, seconds=0.0)


def test_both_loops_train_the_same_network_and_count_its_examples():
    single = train_one(TRIAL, WORKLOAD, GOAL, batch=vars(DOUBLING))
    lightning = train_one(TRIAL, WORKLOAD, GOAL, batch=vars(DOUBLING), lean=False)
    assert (single.engine, lightning.engine) == ("single", "lightning")
    assert single.curve == lightning.curve
    assert single.curve["examples"] == EXAMPLES
    assert not single.flags and not lightning.flags
    constant = train_one(TRIAL, WORKLOAD, GOAL)
    assert "examples" not in constant.curve
    assert single.curve["train_loss"] != constant.curve["train_loss"]


def on_a_rank() -> tuple:
    result = train_one(TRIAL, WORKLOAD, GOAL, batch=vars(DOUBLING), lean=False)
    curve = {name: np.round(values, 4).tolist() for name, values in result.curve.items()}
    return result.status, result.steps_run, curve


def test_two_ranks_train_the_steps_of_one_process():
    """Each rank has its part of a batch of every size."""
    together = same_on_ranks(2, on_a_rank)
    assert together == on_a_rank()
    assert together[2]["examples"] == EXAMPLES


class Foreign(LightningDataModule):
    """Data that know nothing of lit_dps."""

    def train_dataloader(self):
        return loader()


def test_batches_of_foreign_data_cannot_grow():
    callback = BatchScheduleCallback(**vars(DOUBLING))
    with refuses("batch.schedule", "doubling"):
        fit(Plain(), datamodule=Foreign(), callbacks=[callback], max_steps=1)
    with refuses("batch.schedule", "doubling"):
        fit(Plain(), loader(), callbacks=[callback], max_steps=1)


def test_a_cell_of_an_axis_trains_with_its_schedule():
    options = BatchConfig(options=DOUBLING.options)
    axes = (("batch.schedule", "doubling"),)
    in_cell = train_one(Trial(Cell(16, 0.5, axes), 0, PARAMS), WORKLOAD, GOAL, batch=vars(options))
    assert in_cell.curve == train_one(TRIAL, WORKLOAD, GOAL, batch=vars(DOUBLING)).curve


# The rate follows the batch: factors of 1/2, 1/sqrt 2 and 1 for batches of 4, 8 and 16 of 16.
WITH_RATE = dataclasses.replace(DOUBLING, rate="sqrt")


@pytest.mark.parametrize("batch", [DOUBLING, WITH_RATE], ids=["none", "sqrt"])
def test_a_stack_trains_the_steps_of_single_networks(batch):
    trials = [dataclasses.replace(TRIAL, point=point) for point in range(3)]
    stacked = train(trials, WORKLOAD, GOAL, batch=vars(batch), size=2)
    assert {result.engine for result in stacked} == {"stacked"}
    for result in stacked:
        single = train_one(result.trial, WORKLOAD, GOAL, batch=vars(batch))
        assert result.curve["examples"] == single.curve["examples"] == EXAMPLES
        losses = result.curve["train_loss"]
        assert losses == pytest.approx(single.curve["train_loss"], rel=1e-4)


class CountedRates(Reading):
    """The sum of the learning rates that it counts."""

    name = "rates"

    def __init__(self):
        self.total = 0.0

    def count(self, rate):
        self.total += rate

    def read(self, moment):
        return {"rate_sum": self.total}


def test_readings_count_the_rates_that_follow_the_batch_in_all_loops():
    sums = {}
    for way, options in {**WAYS, "stacked": {"size": 2, "stacks_alone": True}}.items():
        result = train_one(
            TRIAL,
            WORKLOAD,
            GOAL,
            batch=vars(WITH_RATE),
            readings=[f"{__name__}.CountedRates"],
            **options,
        )
        assert result.engine == way
        sums[way] = result.readings["rates"]["rate_sum"]
    rate = PARAMS["model.learning_rate"]
    factors = 3 * [0.5] + 3 * [0.5**0.5] + 14 * [1.0]
    expected = [rate * sum(factors[:step]) for step in (4, 8, 12, 16, 20)]
    for way, found in sums.items():
        assert found == pytest.approx(expected, rel=1e-6), way


class RatesOfSteps(CountedRates):
    """The sum after each step."""

    when = "step"


@pytest.mark.parametrize("plugins", [[], [ScaledLoss]])
def test_readings_count_the_rates_of_a_scaled_loss_too(plugins):
    batch = BatchScheduleCallback(**vars(WITH_RATE))
    readings = ReadingsCallback([f"{__name__}.RatesOfSteps"])
    fit(
        ImageClassifier(MLP(hidden=[4]), learning_rate=0.01),
        datamodule=Digits(batch_size=16),
        callbacks=[batch, readings],
        plugins=[plugin() for plugin in plugins],
        max_steps=4,
    )
    sums = [0.005, 0.01, 0.015, 0.015 + 0.01 * 0.5**0.5]
    assert readings.columns["rates"]["rate_sum"] == pytest.approx(sums)


def test_rows_that_began_at_different_checks_have_their_own_sizes_and_rates():
    """A row of the stack ends early, and another trial takes its place."""
    goal = GOAL | {"error": 0.7}
    trials = []
    for point, rate in enumerate([0.05, 0.002, 0.05, 0.02]):
        params = PARAMS | {"model.learning_rate": rate}
        trials.append(dataclasses.replace(TRIAL, point=point, params=params))
    stacked = train(trials, WORKLOAD, goal, batch=vars(WITH_RATE), size=2)
    lengths = set()
    for result in stacked:
        single = train_one(result.trial, WORKLOAD, goal, batch=vars(WITH_RATE))
        assert result.engine == "stacked"
        assert result.steps_run == single.steps_run
        assert result.curve["examples"] == single.curve["examples"]
        assert result.curve["train_loss"] == pytest.approx(single.curve["train_loss"], rel=1e-4)
        lengths.add(result.steps_run)
    assert len(lengths) > 1


class Rates(Callback):
    """Records the learning rate of each step, and the rate between the steps."""

    def __init__(self):
        self.of_steps = []
        self.between = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.of_steps.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, *args):
        self.between.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("parts", [1, 4])
def test_the_rate_of_each_step_is_the_schedules_times_the_factor_of_its_size(parts):
    schedule = {"model.schedule": "linear", "model.decay_steps": 8, "model.end_factor": 0.5}
    axes = ()
    if parts > 1:
        axes = (("trainer.accumulate_grad_batches", parts),)
    built = WORKLOAD.build(Trial(Cell(16, 0.0, axes), 0, PARAMS | schedule))
    rates = Rates()
    fit(
        built.module,
        datamodule=built.data,
        callbacks=[BatchScheduleCallback(**vars(WITH_RATE)), rates],
        max_steps=8,
        accumulate_grad_batches=parts,
    )
    without = [0.02 * (1 - 0.5 * step / 8) for step in range(9)]
    factors = [0.5] * 3 + [0.5**0.5] * 3 + [1.0] * 2
    expected = [rate * factor for rate, factor in zip(without[:8], factors, strict=True)]
    assert rates.of_steps == pytest.approx(expected, rel=1e-12)
    assert rates.between[parts - 1 :: parts] == pytest.approx(without[1:], rel=1e-12)


def test_both_loops_and_a_resumed_run_have_the_same_rates(tmp_path):
    decaying = {"model.schedule": "linear", "model.decay_steps": 16, "model.end_factor": 0.1}
    trial = dataclasses.replace(TRIAL, params=PARAMS | decaying)
    single = train_one(trial, WORKLOAD, GOAL, batch=vars(WITH_RATE))
    lightning = train_one(trial, WORKLOAD, GOAL, batch=vars(WITH_RATE), lean=False)
    assert single.curve == lightning.curve
    constant = train_one(trial, WORKLOAD, GOAL, batch=vars(DOUBLING))
    assert single.curve["train_loss"] != constant.curve["train_loss"]
    for how in WAYS.values():
        checkpoints = Checkpoints(tmp_path, "study", minutes=0)
        engine = engine_of(WORKLOAD, GOAL, checkpoints=checkpoints, batch=vars(WITH_RATE), **how)

        def interrupt():
            raise Interrupted("test")

        with pytest.raises(Interrupted):
            list(engine.train(runs([trial], GOAL), interrupt))
        (resumed,) = engine.train(runs([trial], GOAL))
        assert resumed.curve == single.curve


class Manual(Plain):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_rate_that_cannot_follow_is_refused():
    data = WORKLOAD.build(TRIAL).data
    callback = BatchScheduleCallback(**vars(WITH_RATE))
    with refuses("batch.rate", "sqrt"):
        fit(Manual(), datamodule=data, callbacks=[callback], max_steps=1)
    # Seesaw lowers the rate without a rule for it.
    seesaw = BatchScheduleCallback("seesaw", {"start": 0.25, "examples": 1024})
    with refuses("batch.schedule", "seesaw"):
        fit(Manual(), datamodule=data, callbacks=[seesaw], max_steps=1)


def test_the_batches_are_the_order_of_the_loader():
    data = WORKLOAD.build(TRIAL).data
    data.setup("fit")
    constant = torch.cat([b.index for b in islice(iter(data.train_dataloader()), 200)])
    data.schedule_batches(DOUBLING.build())
    batches = [batch.index for batch in islice(iter(data.train_dataloader()), 200)]
    stream = torch.cat(batches)
    assert [len(batch) for batch in batches[:8]] == [4, 4, 4, 8, 8, 8, 16, 16]
    assert torch.equal(stream, constant[: len(stream)])
    # Each epoch reads each example once.
    size = data.training_size
    assert len(stream) > size and stream[:size].sort().values.tolist() == list(range(size))
    intervals = islice(interval_batches(data.epochs(), data.batch_sizes(), 4), 50)
    assert torch.equal(torch.cat([step for of_steps in intervals for step in of_steps]), stream)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("checks", [1, 2])
def test_a_run_killed_between_sizes_resumes_as_an_unbroken_one(tmp_path, how, checks):
    unbroken = train_one(TRIAL, WORKLOAD, GOAL, batch=vars(DOUBLING), **how)
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    seen = 0

    def raise_if_stopped():
        nonlocal seen
        seen += 1
        if seen == checks:
            raise Interrupted("test")

    engine = engine_of(WORKLOAD, GOAL, checkpoints=checkpoints, batch=vars(DOUBLING), **how)
    with pytest.raises(Interrupted):
        list(engine.train(runs([TRIAL], GOAL), raise_if_stopped))
    assert [*tmp_path.rglob("*.ckpt")]
    (resumed,) = engine.train(runs([TRIAL], GOAL))
    assert plain(resumed) == plain(unbroken)


def accumulating(parts, batch_size=16):
    return Trial(Cell(batch_size, 0.5, (("trainer.accumulate_grad_batches", parts),)), 0, PARAMS)


@pytest.mark.parametrize("batch", [BatchConfig(), DOUBLING], ids=["constant", "doubling"])
def test_accumulated_batches_are_the_batch_of_the_cell(batch):
    """The mean loss of 16 examples has the gradient of the mean over 4 means of 4 examples."""
    whole = train_one(TRIAL, WORKLOAD, GOAL, batch=vars(batch))
    in_parts = train_one(accumulating(4), WORKLOAD, GOAL, batch=vars(batch))
    assert in_parts.engine == "lightning"
    assert in_parts.curve["step"] == whole.curve["step"]
    assert in_parts.curve.get("examples") == whole.curve.get("examples")
    # The loss of a step is the mean over its batches.
    assert in_parts.curve["train_loss"] == pytest.approx(whole.curve["train_loss"], rel=2e-4)
    other = train_one(accumulating(4, batch_size=32), WORKLOAD, GOAL)
    assert other.curve["train_loss"] != pytest.approx(whole.curve["train_loss"], rel=2e-4)


def test_the_next_fit_of_the_data_has_constant_batches():
    built = WORKLOAD.build(TRIAL)
    callback = BatchScheduleCallback(**vars(DOUBLING))
    fit(built.module, datamodule=built.data, callbacks=[callback], max_steps=2)
    assert list(islice(built.data.batch_sizes(), 3)) == [16, 16, 16]
    with pytest.raises(ZeroDivisionError):
        fit(built.module, datamodule=built.data, callbacks=[callback, Breaks()], max_steps=2)
    assert next(iter(built.data.batch_sizes())) == 16


class Breaks(Callback):
    def on_train_start(self, trainer, pl_module):
        assert next(iter(trainer.datamodule.batch_sizes())) == 4
        raise ZeroDivisionError


@pytest.mark.parametrize("user", [AdamScalingCallback(2), BranchCallback([1])])
def test_callbacks_of_one_batch_size_refuse_a_schedule(user):
    built = WORKLOAD.build(TRIAL)
    callbacks = [user, BatchScheduleCallback(**vars(DOUBLING))]
    with refuses("batch.schedule", "doubling"):
        fit(built.module, datamodule=built.data, callbacks=callbacks, max_steps=1)


@pytest.mark.parametrize(
    ("goal", "batch", "key"),
    [
        ({}, DOUBLING, "batch.schedule"),
        ({}, BatchConfig(), "study.readings"),
        ({"unit": "examples"}, DOUBLING, "goal.unit"),
        ({"max_examples": 9}, DOUBLING, "goal.max_examples"),
    ],
)
def test_batches_that_cannot_be_counted_name_the_key_that_counts_them(goal, batch, key):
    trainer = Trainer(callbacks=[BatchScheduleCallback(**vars(batch))], logger=False)
    attempt = Attempt(TRIAL, Goal(0.5, **goal))
    attempt.count("examples")
    spent = SpentOfSteps()
    spent.add_batch(None)
    spent.step()
    with pytest.raises(ConfigError) as raised:
        spent.take(trainer, attempt, Stopwatch())
    assert raised.value.key == key


def test_a_step_that_cannot_be_accumulated_is_refused():
    sizes = DOUBLING.build().sizes_of_parts(8, 4)  # steps of 2 examples
    with pytest.raises(ConfigError) as raised:
        next(sizes)
    assert raised.value.key == "batch.schedule"
