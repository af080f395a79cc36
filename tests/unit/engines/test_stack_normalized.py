"""Batch normalization, dropout and clipped gradients in a stack."""

from __future__ import annotations

import pytest
import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.engines.network_run import NetworkRun, build_trial
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.optim.clipping import Clipping
from lit_dps.training import GoalErrorCallback
from lit_dps.training.hidden_state import preserve_rng_state
from tests.support.conformance import assert_conform, by_trial
from tests.support.runs import train
from tests.support.setups import training_of
from tests.unit.engines.test_eligible import network
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, both, trials, workload

CLIPPED = [
    {"gradient_clip_val": 0.3},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


def begun(used, goal, asked) -> list[NetworkRun]:
    training = training_of(used, goal)
    runs = []
    for trial in asked:
        attempt = Attempt(trial, GoalErrorCallback(**goal).goal)
        built, device = build_trial(training, trial)
        runs.append(NetworkRun.build_or_resume(attempt, built, training, device))
        runs[-1].prune_unless_resumed(training)
    return runs


def test_networks_with_batch_normalization_end_as_alone():
    used = workload(**network("Normalized"))
    asked = trials(Cell(16, 0.0), Cell(16, 0.5), rates=[0.002, 0.01, 0.02])
    ours, reference = both(used, asked)
    assert {result.engine for result in ours} == {"stacked"}
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []


def test_running_statistics_are_those_of_each_network_alone():
    used = workload(**network("Normalized"))
    asked = trials(Cell(16, 0.0), rates=[0.01, 0.05, 0.1])
    goal = {**GOAL, "check_interval": 3, "max_steps": 3}
    stack = StackedNetworks(begun(used, goal, asked))
    group = RunGroup(stack, training_of(used, goal))
    group.train_intervals(1)
    for row, run in enumerate(begun(used, goal, asked)):
        RunGroup(SingleNetwork(run), training_of(used, goal)).train_intervals(1)
        stack.write_back_weights(row)
        buffers = dict(stack.run_at(row).module.named_buffers())
        assert int(buffers["network.layers.2.num_batches_tracked"]) == 3
        for name, expected in run.module.named_buffers():
            torch.testing.assert_close(buffers[name], expected, rtol=1e-4, atol=1e-6)
    variances = stack.tensors.buffers["network.layers.2.running_var"]
    assert not torch.allclose(variances[0], variances[1], rtol=1e-3)


def test_each_network_of_a_stack_draws_its_own_dropout():
    used = workload(**network("Normalized", layer="Dropout"))
    goal = {**GOAL, "check_interval": 1, "max_steps": 1}
    asked = [Trial(Cell(16, 0.0), 0, {"model.learning_rate": 0.05})] * 400
    stack = StackedNetworks(begun(used, goal, asked))
    with preserve_rng_state(seed=1):
        group = RunGroup(stack, training_of(used, goal))
        (outcomes,) = group.train_intervals(1)
    stacked = torch.tensor([outcome.validation.loss for outcome in outcomes], dtype=torch.float64)
    alone = []
    (run,) = begun(used, goal, asked[:1])
    x, y = run.data.on_device("train", run.module.device)
    batch = next(run.batches)[0]
    with preserve_rng_state(seed=2), torch.no_grad():
        for _ in range(400):
            alone.append(float(run.module.loss((x[batch], y[batch]))))
    expected = torch.tensor(alone, dtype=torch.float64)
    assert len(set(stacked.tolist())) > 390, "two networks do not draw the same"
    error = float(expected.std() * (2 / 400) ** 0.5)
    assert abs(float(stacked.mean() - expected.mean())) < 4 * error
    assert float(stacked.std() / expected.std()) == pytest.approx(1.0, abs=0.15)


def test_networks_with_dropout_train_in_a_stack():
    used = workload(**network("Normalized", layer="Dropout"))
    goal = {**GOAL, "max_steps": 400}
    results = train(trials(Cell(16, 0.0), rates=[0.02, 0.01]), used, goal, size=16)
    assert [result.engine for result in results] == ["stacked", "stacked"]
    assert {result.status for result in results} == {Status.COMPLETE}


@pytest.mark.parametrize("trainer", CLIPPED, ids=str)
def test_clipped_gradients_are_clipped_for_each_network(trainer):
    used = workload(trainer=trainer)
    asked = trials(Cell(16, 0.0), Cell(16, 0.5), rates=[0.002, 0.05, 0.2])
    ours, reference = both(used, asked)
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []
    unclipped = train(asked, workload(), GOAL)
    for key, result in by_trial(ours).items():
        assert result.curve["train_loss"] != by_trial(unclipped)[key].curve["train_loss"]


@pytest.mark.parametrize("trainer", CLIPPED, ids=str)
def test_one_network_is_clipped_as_in_lightning_s_loop_to_the_bit(trainer):
    asked = trials(Cell(16, 0.5), rates=[0.05, 0.2])
    ours = train(asked, workload(trainer=trainer), GOAL)
    reference = train(asked, workload(trainer=trainer), GOAL, lean=False)
    assert {result.engine for result in ours} == {"single"}
    assert [result.curve for result in ours] == [result.curve for result in reference]


def test_clipping_of_rows_is_that_of_torch():
    rows = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    rows[1] *= 1e-3  # below the limit
    for clipping in (Clipping(0.5), Clipping(0.2, by_value=True)):
        clipped = rows.clone()
        clipping.clip_rows(clipped)
        for row, gradient in zip(clipped, rows, strict=True):
            parameter = torch.zeros(7, requires_grad=True)
            parameter.grad = gradient.clone()
            clipping.clip([parameter])
            torch.testing.assert_close(row, parameter.grad)
    assert Clipping.of({"gradient_clip_val": 0}) is None
