"""A loss that is no mean over examples, and batch norm, are found by short runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lit_dps.advice.batch_dependence import allows_accumulation, batch_dependence, note_on
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.core.trial import Cell, Trial
from lit_dps.study.preflight.parts_check import LOSS, NORM, UNKNOWN, WEIGHTS, differs
from tests.support.tiny import Plain, points
from tests.unit.advice.test_step_probe import setup

HERE = __name__


class Contrastive(Plain):
    """The other examples of a batch are the negatives; each view has noise of its own."""

    def training_step(self, batch, batch_idx):
        x = batch[0]
        views = [self.network(x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        similarities = views[0] @ views[1].T
        return nn.functional.cross_entropy(similarities, torch.arange(len(x)))


class Dropped(Plain):
    """A mean over examples, with dropout."""

    def training_step(self, batch, batch_idx):
        return nn.functional.dropout(self.network(batch[0]), 0.5).square().mean()


class Summed(Plain):
    def training_step(self, batch, batch_idx):
        return 1e-3 * self.network(batch[0]).square().sum()


class Weighted(Plain):
    """A mean over the features above 0, of which each example has another number."""

    def training_step(self, batch, batch_idx):
        weights = (batch[0] > 0).sum(1)
        losses = self.network(batch[0]).square().mean(1)
        return (losses * weights).sum() / weights.sum()


class Manual(Plain):
    """Steps its optimizer itself, and returns no loss."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.network(batch[0]).square().mean().backward()
        self.optimizers().step()


class Freed(Manual):
    """Steps its optimizer itself, and returns a loss whose graph is freed."""

    def training_step(self, batch, batch_idx):
        loss = self.network(batch[0]).square().mean()
        loss.backward()
        self.optimizers().step()
        return loss


class Embedded(Plain):
    """An embedding with sparse gradients, and a mean over examples or a sum."""

    is_sum = False

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.embedding = nn.Embedding(2, 4, sparse=True)

    def training_step(self, batch, batch_idx):
        losses = self.embedding((batch[0][:, 0] > 0).long()).square().sum(1)
        return losses.sum() if self.is_sum else losses.mean()


class EmbeddedSum(Embedded):
    is_sum = True


class Normed(Plain):
    """Batch norm before a mean over examples."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(points(1)[0][0].numel())

    def training_step(self, batch, batch_idx):
        return self.network(self.norm(batch[0])).square().mean()


class Frozen(Normed):
    """Freezes its batch norm when training starts."""

    def on_train_start(self):
        self.norm.eval()

    def training_step(self, batch, batch_idx):
        self.norm.eval()
        return super().training_step(batch, batch_idx)


class Unlabelled(Plain):
    """The loss of each half of a batch of 16 is nan."""

    def training_step(self, batch, batch_idx):
        loss = self.network(batch[0]).square().mean()
        return loss if len(batch[0]) == 16 else loss * torch.nan


class Uncut(Plain):
    """Refuses a part of its batch."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) != 16:
            raise ValueError("a whole batch has 16 examples")
        return super().training_step(batch, batch_idx)


def depends_on(module: str) -> list[str]:
    study = setup()
    spec = {"class_path": f"{HERE}.{module}"}
    workload = dataclasses.replace(study.workload, model=spec)
    study = dataclasses.replace(study, workload=workload)
    return batch_dependence(study, Trial(Cell(16), 0, {}, 0))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("Contrastive", [LOSS]),
        ("Summed", [LOSS]),
        ("Weighted", [WEIGHTS]),
        ("Manual", [UNKNOWN]),
        ("Freed", [UNKNOWN]),
        ("Embedded", []),
        ("EmbeddedSum", [LOSS]),
        ("Normed", [NORM]),
        ("Dropped", []),
        ("Frozen", []),
        ("Unlabelled", [UNKNOWN]),
    ],
)
def test_what_depends_on_the_batch(module, expected):
    assert depends_on(module) == expected


def test_a_module_that_refuses_parts_fails_with_its_own_error():
    with pytest.raises(ValueError, match="a whole batch has 16 examples"):
        depends_on("Uncut")


def test_losses_differ_by_standard_errors_and_by_a_share():
    wholes = [1.0, 1.1, 0.9, 1.0]
    assert differs(wholes, [0.5, 0.6, 0.4, 0.5])
    assert not differs(wholes, [0.99, 1.09, 0.89, 0.99]), "1 % of the loss"
    assert not differs(wholes, [0.2, 1.9, 0.1, 1.2]), "noise"
    assert differs([1.0], [0.5]) is None


def test_the_note_says_whether_rows_are_left_out():
    assert "no rows with accumulation" in note_on(LOSS, is_accumulated=False)
    assert "no rows" not in note_on(NORM, is_accumulated=True)
    assert "assume" in note_on(UNKNOWN, is_accumulated=False)
    assert not allows_accumulation([LOSS]) and not allows_accumulation([UNKNOWN, NORM])
    assert allows_accumulation([WEIGHTS]) and allows_accumulation([UNKNOWN])


def test_a_batch_that_cannot_be_accumulated_has_no_step_time():
    timed = [Timed(m, 0.01 + 1e-3 * m) for m in (1, 2, 4, 8)]
    model = fit_step_time(timed, largest=8)
    assert model.at(16) is not None
    refusing = dataclasses.replace(model, can_accumulate=False)
    assert refusing.at(16) is None
    assert refusing.at(8).value == model.at(8).value
