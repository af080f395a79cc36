"""What counts as an optimizer step, of modules that step in ways of their own, also when a run is
taken up again."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, default_collate

from lit_dps.core.trial import Status
from lit_dps.training import GoalErrorCallback
from lit_dps.training.step_count import ExamplesCallback
from tests.support.scaled_loss import ScaledLoss
from tests.support.tiny import QUIET, Plain, fit, loader, points


class Skips(Plain):
    """Gives no loss at every third batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 2 else super().training_step(batch, batch_idx)


class Thrice(Plain):
    """Takes three steps a batch."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        for _ in range(3):
            self.optimizers().zero_grad()
            self.manual_backward(F.cross_entropy(self.network(x), y))
            self.optimizers().step()


class ByHand(Plain):
    """Steps at every fourth batch, by Lightning's own hook."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if (batch_idx + 1) % 4 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Raw(Thrice):
    """Steps the optimizer that Lightning does not count."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.network(x), y))
        optimizer.step()


KINDS = [
    (Skips, 17, 1),
    (Thrice, 12, 3),
    (ByHand, 48, 1),
    (Raw, 12, 1),
]  # batches and updates of 12 steps


@pytest.mark.parametrize(("kind", "batches", "updates"), KINDS)
def test_steps_are_updates_of_the_network(kind, batches, updates):
    module, callback = kind(), GoalErrorCallback(0.2, 4, 12)
    seen = []
    module.on_train_batch_start = lambda *_: seen.append(module.global_step)
    trainer = fit(module, loader(48), loader(), callbacks=[callback])
    assert (callback.status, callback.curve["step"]) == (Status.INCOMPLETE, [4, 8, 12])
    assert callback.steps == trainer.global_step == 12
    assert len(seen) == batches and seen == sorted(seen) and set(seen) == set(range(12))
    if kind is not Skips:  # whose optimizer is called at every batch, with nothing to step by
        assert module.taken == 12 * updates


@pytest.mark.parametrize(("kind", "batches", "updates"), KINDS)
def test_a_run_that_is_taken_up_goes_on_to_its_budget(tmp_path, kind, batches, updates):
    first = fit(
        kind(), loader(48), loader(), callbacks=[GoalErrorCallback(0.2, 4, 24)], max_steps=12
    )
    assert first.global_step == 12
    first.save_checkpoint(tmp_path / "half.ckpt")
    again = GoalErrorCallback(0.2, 4, 24)
    trainer = fit(kind(), loader(48), loader(), callbacks=[again], ckpt_path=tmp_path / "half.ckpt")
    assert (again.status, again.steps, trainer.global_step) == (Status.INCOMPLETE, 24, 24)
    assert again.curve["step"] == [4, 8, 12, 16, 20, 24]


def test_the_length_of_training_stays_what_it_was():
    """A batch without a loss, or a second optimizer, changes nothing of what schedules are told."""
    lengths = set()

    class Asks(Skips):
        def on_train_batch_start(self, *_):
            lengths.add((self.trainer.max_steps, self.trainer.max_epochs))

    fit(Asks(), loader(48), loader(), callbacks=[GoalErrorCallback(0.2, 4, 24)])
    assert {steps for steps, _ in lengths} == {24}
    assert lengths == {(24, 2), (24, 3)}, (
        "24 steps are 2 epochs of 12 batches, and one more where some have no loss"
    )


class Steep(Plain):
    """Has a loss that is 16 times as large."""

    def training_step(self, batch, batch_idx):
        return 16 * super().training_step(batch, batch_idx)


def test_steps_that_a_scaler_skips_count_and_their_batches_are_not_accumulated():
    """The scaled gradients of the first steps overflow; the scale is halved after each of them."""
    module, callback = Steep(), GoalErrorCallback(0.2, 4, 12)
    examples = ExamplesCallback(4)
    scaling = ScaledLoss(init_scale=2.0**127)
    trainer = fit(module, loader(48), loader(), callbacks=[callback, examples], plugins=[scaling])
    assert (callback.status, callback.curve["step"]) == (Status.INCOMPLETE, [4, 8, 12])
    assert callback.steps == trainer.global_step == 12
    assert examples.flags == {}
    assert 0 < module.taken < 12


class Shrinks(Plain):
    """Half as many batches in every epoch."""

    def train_dataloader(self):
        return loader(64 >> min(self.trainer.current_epoch, 3))


def test_a_run_whose_epochs_turn_out_shorter_goes_on_to_its_budget():
    module, callback = Shrinks(), GoalErrorCallback(0.2, 4, 40)
    module.val_dataloader = lambda: loader()
    Trainer(**QUIET, callbacks=[callback], reload_dataloaders_every_n_epochs=1).fit(module)
    assert (callback.status, callback.steps) == (Status.INCOMPLETE, 40)


class Follows(Plain):
    """A schedule that halves the rate at each new value, since the metric never falls."""

    def __init__(self, interval: str, frequency: int):
        super().__init__()
        self.interval, self.frequency = interval, frequency

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.0
        )
        how = {"monitor": "val_error", "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **how}}


@pytest.mark.parametrize(
    ("interval", "frequency", "batches", "taken"),
    [("step", 1, 2, 10), ("step", 3, 60, 9), ("epoch", 1, 2, 10), ("epoch", 2, 2, 10)],
)
def test_a_schedule_takes_each_check_once(interval, frequency, batches, taken):
    """40 steps with 10 checks: the first value sets the mark, each later one halves the rate.

    Of those asked for at every third step, the check at the last step comes too late for one.
    """
    module = Follows(interval, frequency)
    trainer = fit(module, loader(4 * batches), loader(), callbacks=[GoalErrorCallback(0.2, 4, 40)])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 ** (taken - 1)


class OnNothing(Plain):
    """Its loader collates None where a batch is no good: the second of three."""


class OnNothingByHand(Raw):
    """The same with manual optimization."""


def collate_some(number: list[int]):
    def collate(rows):
        number.append(len(number))
        return None if number[-1] % 3 == 1 else default_collate(rows)

    return collate


@pytest.mark.parametrize("kind", [OnNothing, OnNothingByHand])
@pytest.mark.parametrize("interval", [1, 4])
def test_a_batch_that_is_none_is_no_step_and_no_check(kind, interval):
    goal, examples, module = GoalErrorCallback(0.2, interval, 8), ExamplesCallback(4), kind()
    data = DataLoader(points(48), 4, collate_fn=collate_some([]))
    trainer = fit(module, data, loader(), callbacks=[goal, examples])
    assert module.taken == goal.steps == trainer.global_step == 8
    assert (
        goal.curve["step"] == list(range(interval, 9, interval)) and module.checks == 8 // interval
    )
    assert examples.flags == {}


class EndsEpochs(Plain):
    """Skips the rest of an epoch after three batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


def test_a_batch_that_is_skipped_with_the_rest_of_its_epoch_is_no_part_of_a_step():
    goal, examples, module = GoalErrorCallback(0.2, 4, 8), ExamplesCallback(4), EndsEpochs()
    fit(module, loader(48), loader(), callbacks=[goal, examples])
    assert module.taken == goal.steps == 8
    assert goal.curve["step"] == [4, 8] and examples.flags == {}


def test_batches_accumulated_before_the_rest_of_an_epoch_is_skipped_are_counted_once():
    goal, examples, module = GoalErrorCallback(0.2, 4, 8), ExamplesCallback(8), EndsEpochs()
    fit(module, loader(48), loader(), callbacks=[goal, examples], accumulate_grad_batches=2)
    assert module.taken == goal.steps == 8
