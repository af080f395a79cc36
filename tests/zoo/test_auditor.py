"""The auditor sees what it is there to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.support.tiny import QUIET
from tests.zoo.animals.data import Clouds
from tests.zoo.animals.models import Net
from tests.zoo.animals.optimizers import Adversarial, WeightNoise
from tests.zoo.auditor import Audit, audited
from tests.zoo.verify import assert_as_audited


class HalfMasked(Callback):
    """Masks the upper half of the head's weights, once."""

    def on_train_start(self, trainer, pl_module):
        keep = torch.arange(64, device=pl_module.device).view(4, 16) >= 32
        self.mask = {"head.weight": keep}
        with torch.no_grad():
            pl_module.head.weight.mul_(keep)


def fit(module, data, **arguments) -> Audit:
    """Two epochs with a check at the end of each."""
    callbacks = arguments.pop("callbacks", [])
    trainer = Trainer(
        **{**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, **arguments}, callbacks=callbacks
    )
    with audited("val_error", {}) as audits:
        trainer.fit(module, datamodule=data)
    (audit,) = audits
    return audit


def test_steps_checks_and_examples():
    audit = fit(Net(), Clouds(32, n=170))
    assert audit.steps == [32, 32, 32, 32, 32, 10] * 2
    assert [(check.step, check.examples) for check in audit.checks] == [(6, {0: 50}), (12, {0: 50})]
    assert audit.again == pytest.approx(audit.checks[-1].error)
    assert audit.mask == {} and audit.pruned == 0


def test_accumulated_batches_and_several_optimizers():
    assert fit(Net(), Clouds(20), accumulate_grad_batches=4).steps == [80, 80] * 2
    assert fit(Adversarial(), Clouds(40)).steps == [40] * 8


def test_pruned_weights_that_come_back():
    assert fit(WeightNoise(), Clouds(32), callbacks=[HalfMasked()]).pruned > 0.001


def test_errors_that_are_not_what_was_seen():
    audit = fit(Net(lr=1e-3), Clouds(16))
    first, last = ({"step": check.step, "error": check.error} for check in audit.checks)
    true = {"status": "incomplete", "steps": None, "flags": {}, "kept": {}}
    goal = {"check_interval": 10, "max_steps": 20, "error": last["error"] / 2}
    cell = SimpleNamespace(batch_size=16, sparsity=0.0)

    def judge(told: dict, asked: dict, where=cell) -> None:
        result = SimpleNamespace(**{**true, **told}, trial=SimpleNamespace(cell=where))
        outcome = SimpleNamespace(
            audit=lambda _: audit, checks=lambda *_: audit.checks, goal={**goal, **asked}
        )
        assert_as_audited(outcome, result)

    judge({}, {})
    for told, asked, where in [
        ({"status": "complete", "steps": 20}, {}, cell),
        ({}, {"error": max(first["error"], 0.5)}, cell),
        ({}, {"check_interval": 5}, cell),
        ({}, {"max_steps": 40}, cell),
        ({"kept": {"head.weight": (1, 2)}}, {}, cell),
        ({"flags": {"short_steps": 1}}, {}, cell),
        ({}, {}, SimpleNamespace(batch_size=32, sparsity=0.0)),
        ({}, {}, SimpleNamespace(batch_size=16, sparsity=0.8)),
    ]:
        with pytest.raises(AssertionError):
            judge(told, asked, where)
