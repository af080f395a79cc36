"""The lean loop trains what Lightning's loop trains, bit for bit, and keeps out of what is not its own."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lit_dps.data import Digits
from lit_dps.engines.lean import LeanLoop
from lit_dps.engines.trainer import LightningEngine
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload
from lit_dps.trial import Cell, Status, Trial
from tests.unit.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401

DECAY = {"schedule": "linear", "decay_steps": 30, "end_factor": 0.1}


def train(trial: Trial, workload: Workload = WORKLOAD, goal=GOAL, **options):
    """A trial's result without its time, the batches Lightning's loop saw, and the final weights."""
    seen = Seen()
    # a callback that does nothing once a step, so that the lean loop still serves
    workload = dataclasses.replace(workload, trainer={**workload.trainer})
    build = workload.build

    def with_callback(trial):
        built = build(trial)
        built.trainer["callbacks"] = [seen, *(built.trainer.get("callbacks") or [])]
        return built

    object.__setattr__(workload, "build", with_callback)
    result = LightningEngine(workload, goal, **options).train(trial)
    return dataclasses.replace(result, seconds=0.0), seen


class Seen(Callback):
    def on_train_end(self, trainer, pl_module):
        self.batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self.steps = trainer.global_step
        self.weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("schedule", [{}, DECAY])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
@pytest.mark.parametrize("batch_size", [3, 700])  # 4 steps of 700 need more than the 1,618 examples of an epoch
def test_a_trial_is_the_same_bit_for_bit(rule, schedule, sparsity, batch_size):
    model = {**MODEL, "init_args": {**MODEL["init_args"], "optimizer": rule, **schedule}}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    trial = Trial(Cell(batch_size, sparsity), 1, PARAMS)
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 40}
    lean, seen = train(trial, workload, goal)
    plain, all_seen = train(trial, workload, goal, lean=False)
    assert lean == plain
    assert torch.equal(seen.weights, all_seen.weights)
    assert (seen.steps, seen.rate) == (all_seen.steps, all_seen.rate)
    assert (4 * seen.batches, seen.steps) == (all_seen.batches, all_seen.batches)


@pytest.mark.parametrize("early_reject", [False, True])
def test_checks_and_the_limit_come_at_the_same_steps(early_reject):
    goal, trial = {**GOAL, "early_reject": early_reject}, Trial(Cell(16, 0.0), 0, PARAMS)
    complete, seen = train(trial, goal=goal)
    assert complete.status is Status.COMPLETE and seen.steps == complete.steps
    assert complete.curve["step"] == list(range(4, complete.steps + 1, 4))
    outraced, seen = train(trial, goal=goal, limit=lambda cell: 8)
    assert (outraced.status, seen.steps, outraced.curve["step"]) == (Status.OUTRACED, 8, [4, 8])
    assert train(trial, goal=goal, limit=lambda cell: 8, lean=False)[0] == outraced


class OwnStep(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class OwnName(ImageClassifier):
    pass


class Augmented(Digits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Watcher(Callback):
    def on_train_batch_end(self, *args):
        pass


def supports(module=ImageClassifier, data=Digits, **arguments) -> bool:
    from lightning.pytorch import Trainer

    from lit_dps.models import MLP

    trainer = Trainer(
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, **arguments},
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.datamodule = data()
    return LeanLoop.supports(trainer, module(MLP((1, 8, 8))))


def test_it_serves_our_own_module_and_data_and_what_changes_nothing_in_a_step():
    assert supports()
    assert supports(module=OwnName)


@pytest.mark.parametrize(
    "other",
    [
        {"module": OwnStep},
        {"data": Augmented},
        {"callbacks": [Watcher()]},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-mixed"},
        {"logger": True},
        {"profiler": "simple"},
        {"detect_anomaly": True},
        {"fast_dev_run": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_it_leaves_alone_what_wants_to_be_asked_at_every_step(other, tmp_path):
    if "logger" in other:
        from lightning.pytorch.loggers import CSVLogger

        other = {"logger": CSVLogger(tmp_path)}
    assert not supports(**other)


def test_two_processes_are_left_to_lightning():
    from lightning.pytorch.strategies import DDPStrategy

    assert not supports(strategy=DDPStrategy(process_group_backend="gloo"), devices=1)


def test_a_module_of_its_own_trains_as_before():
    seen = partial(train, Trial(Cell(16, 0.5), 0, PARAMS))
    model = {**MODEL, "class_path": "tests.unit.test_lean.OwnStep"}
    (own, steps), (ours, _) = seen(Workload(model, DATA, {"accelerator": "cpu"})), seen()
    assert own == ours
    assert steps.batches == steps.steps
