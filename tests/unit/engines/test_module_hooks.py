"""Which hooks of a user's module keep the fast loop: with them both loops give equal values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_dps.core.trial import IN_NO_MASK, JOINED_AT, Cell
from lit_dps.engines.module_hooks import CALLED_HOOKS, LIGHTNING_METHODS, does_nothing, overridden
from lit_dps.module import ImageClassifier
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import GOAL, trials, workload

HERE = "tests.unit.engines.test_module_hooks."
BRIEF = {**GOAL, "max_steps": 12, "check_interval": 4}
CALLS: list[str] = []


class Recording(ImageClassifier):
    """Records each hook that a fit calls, and logs in some."""

    def loss(self, batch):
        loss = super().loss(batch)
        self.log("my_loss", loss)
        return loss

    def prepare_data(self):
        CALLS.append("prepare_data")

    def setup(self, stage):
        CALLS.append(f"setup {stage}")

    def on_fit_start(self):
        super().on_fit_start()
        CALLS.append("on_fit_start")

    def on_train_start(self):
        CALLS.append("on_train_start")

    def on_train_epoch_start(self):
        CALLS.append("on_train_epoch_start")

    def on_before_zero_grad(self, optimizer):
        CALLS.append(f"on_before_zero_grad {type(optimizer).__name__}")

    def on_before_backward(self, loss):
        CALLS.append(f"on_before_backward {loss.item()}")

    def on_after_backward(self):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        CALLS.append(f"on_after_backward {float(sum(g.abs().sum() for g in gradients))}")

    def on_before_optimizer_step(self, optimizer):
        norm = sum(p.grad.square().sum() for p in self.parameters())
        self.log("norm", norm)
        CALLS.append(f"on_before_optimizer_step {type(optimizer).__name__} {float(norm)}")

    def on_train_epoch_end(self):
        CALLS.append("on_train_epoch_end")

    def on_train_end(self):
        CALLS.append(
            f"on_train_end {float(sum(p.detach().abs().sum() for p in self.parameters()))}"
        )

    def on_fit_end(self):
        CALLS.append("on_fit_end")

    def teardown(self, stage):
        CALLS.append(f"teardown {stage}")


class Shrinking(ImageClassifier):
    """Changes its weights before the first step, also the pruned ones."""

    def on_train_start(self):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5).add_(0.001)


class Noisy(ImageClassifier):
    """Changes gradients, also those of pruned weights."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad += 0.01 * torch.rand_like(parameter)


class Empty(ImageClassifier):
    """Overrides hooks that Lightning's loop alone calls, with nothing."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Do nothing."""

    def on_train_batch_start(self, batch, batch_idx):
        return None

    def on_save_checkpoint(self, checkpoint):
        pass


class Unrelated(ImageClassifier):
    """Overrides hooks of tests and predictions, which a fit does not call."""

    def on_test_epoch_end(self):
        raise AssertionError

    def on_predict_start(self):
        raise AssertionError


class EarlyOnly(ImageClassifier):
    """Overrides a hook of full validations, which early checks replace by `per_example_error`."""

    def per_example_error(self, batch):
        return super().per_example_error(batch)

    def on_validation_epoch_end(self):
        raise AssertionError


def run(name: str, **options):
    asked = trials(Cell(16, 0.0), Cell(16, 0.8), rates=[0.02])
    used = workload(class_path=HERE + name)
    results = train(asked, used, {**BRIEF, "early_reject": True}, **options)
    return [replace(result, seconds=0) for result in results]


@pytest.mark.parametrize("name", ["Recording", "Shrinking", "Noisy"])
def test_hooks_that_the_fast_loop_calls_give_equal_values(name):
    lightning = run(name, lean=False)
    ours = run(name)
    assert [result.engine for result in ours] == ["single"] * 2
    assert ours == lightning
    usual = run("Unrelated")
    assert ([r.curve for r in ours] == [r.curve for r in usual]) is (name == "Recording")
    # A stack calls no hooks, so these modules are trained one at a time.
    assert run(name, size=2) == lightning


def test_both_loops_call_the_same_hooks_with_the_same_values():
    asked = trials(Cell(16, 0.8), rates=[0.02])
    used = workload(class_path=HERE + "Recording")
    calls = []
    for lean in (False, True):
        CALLS.clear()
        train(asked, used, BRIEF, lean=lean)
        # The interval loop calls all hooks once before, on a module that it does not train.
        last = len(CALLS) - CALLS[::-1].index("prepare_data") - 1
        calls.append(CALLS[last:])
    assert calls[0] == calls[1]
    hooks_of_copy = 2  # of the pruning pass
    assert len(calls[0]) == 9 + hooks_of_copy + 4 * 12


@pytest.mark.parametrize("name", ["Empty", "Unrelated", "EarlyOnly"])
def test_hooks_without_effect_on_training_may_even_be_stacked(name):
    lightning = run(name, lean=False)
    assert {result.engine for result in lightning} == {"lightning"}
    assert run(name) == lightning
    assert {result.engine for result in run(name)} == {"single"}
    assert {result.engine for result in run(name, size=2)} == {"stacked"}


class Reading(ImageClassifier):
    def on_train_end(self):
        self.final_step = self.trainer.global_step


class ReadingLate(ImageClassifier):
    """Reads the trainer in the third step only."""

    steps = 0

    def on_before_zero_grad(self, optimizer):
        self.steps += 1
        if self.steps == 3:
            self.seen = self.current_epoch


class Freezing(ImageClassifier):
    """Stops training of the biases after some steps."""

    steps = 0

    def on_after_backward(self):
        self.steps += 1
        if self.steps == 3:
            for parameter in self.parameters():
                parameter.requires_grad_(parameter.ndim > 1)


class Joining(ImageClassifier):
    """Its loss uses another layer after some steps."""

    steps = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = torch.nn.Linear(1, 3, bias=False)

    def on_before_optimizer_step(self, optimizer):
        self.steps += 1

    def forward(self, x):
        if self.steps < 6:
            return super().forward(x)
        return super().forward(x) * self.scale.weight.sum()


class Adding(Joining):
    """Its optimizer trains another layer after some steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if self.steps == 6:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 3))]})


class EachBatch(ImageClassifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = batch_idx


class Keeping(ImageClassifier):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


class Validating(ImageClassifier):
    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("mine", 1.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Reading", "Reading reads trainer.global_step"),
        ("ReadingLate", "ReadingLate reads trainer.current_epoch"),
        ("Freezing", "Freezing changes which weights are trained"),
        ("Adding", "Adding changes which weights are trained"),
        ("EachBatch", "EachBatch overrides on_train_batch_end"),
        ("Keeping", "Keeping overrides on_save_checkpoint"),
        (
            "Validating",
            "Validating overrides on_validation_epoch_end but not per_example_error",
        ),
    ],
)
def test_other_hooks_are_left_to_lightning_s_loop_which_says_why(name, reason):
    lightning = run(name, lean=False)
    ours = run(name)
    assert ours == lightning
    assert [(r.engine, r.engine_reason) for r in ours] == [("lightning", reason)] * 2
    assert {r.engine for r in run(name, size=2)} == {"lightning"}


def test_weights_that_join_the_training_are_counted():
    """Lightning's loop counts them, so that it replaces the loop of single networks."""
    dense, sparse = run("Joining")
    assert dense.engine == "single" and IN_NO_MASK not in dense.flags
    reason = "Joining trains weights that its loss did not use when pruned"
    assert (sparse.engine, sparse.engine_reason) == ("lightning", reason)
    assert (sparse.flags[IN_NO_MASK], sparse.flags[JOINED_AT]) == (3, 7)


def test_every_hook_is_of_one_kind():
    assert not {*CALLED_HOOKS} & {*LIGHTNING_METHODS}
    assert overridden(ImageClassifier(torch.nn.Linear(1, 1)), LIGHTNING_METHODS) == []


def test_an_empty_body_does_nothing():
    def returns(self):
        return 1

    def yields(self):
        yield

    def calls(self):
        print()

    assert does_nothing(Empty.on_train_batch_end) and does_nothing(Empty.on_train_batch_start)
    assert does_nothing(lambda: None)
    assert not any(map(does_nothing, (returns, yields, calls, print)))
