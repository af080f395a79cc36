"""Checks that stop when they know: the same answers as full passes, for fewer examples."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import nn

from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Status
from lit_dps.module import ImageClassifier, LanguageModel
from lit_dps.training import GoalErrorCallback
from lit_dps.training.early_validation import CHUNK, EarlyValidation
from tests.support.errors import refuses
from tests.support.tiny import QUIET, assert_equal, fit, loader, weights

N = 1000


class Points(LightningDataModule):
    """Points on a line whose class is their sign, some mislabelled; a validation split of 1,000."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(N, 4, generator=generator)
        self.y = (self.x.sum(1) + 0.5 * torch.randn(N, generator=generator) > 0).long()
        self.looked_at = 0

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x, self.y), 10)

    def val_dataloader(self):
        own = (
            torch.Generator()
        )  # else each pass draws a seed from the global generator, and dropout goes another way
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(self.x, self.y), 300, generator=own
        )

    @property
    def validation_size(self) -> int:
        return N

    def validation_batch(self, index):
        self.looked_at += len(index)
        return self.x[index], self.y[index]


def classifier(**arguments) -> ImageClassifier:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    return ImageClassifier(network, learning_rate=0.05, **arguments)


def run(early: bool, goal: float, further=(), steps: int = 60):
    check = GoalErrorCallback(goal, 2, steps, early_reject=early)
    check.record_in(Attempt(None, check.goal, further))
    module, data = classifier(), Points()
    torch.manual_seed(0)
    fit(module, callbacks=[check], datamodule=data)
    return check, module, data


@pytest.mark.parametrize("goal", [0.3, 0.2, 0.15, 0.001])
def test_a_run_ends_where_full_checks_end_it(goal):
    early, module, data = run(True, goal)
    full, plain, _ = run(False, goal)
    assert (early.status, early.steps_to_result) == (full.status, full.steps_to_result)
    assert early.curve["step"] == full.curve["step"]
    assert early.curve["train_loss"] == full.curve["train_loss"]
    assert_equal(weights(module), weights(plain))
    assert module.training and module.network[1].training
    pairs = list(
        zip(early.curve["val_error"], full.curve["val_error"], early.curve["exact"], strict=True)
    )
    assert all(ours == theirs if exact else goal < ours <= theirs for ours, theirs, exact in pairs)
    assert data.looked_at < N * len(pairs)


def test_further_goals_are_met_at_the_same_steps():
    goals = (0.3, 0.2)
    early, full = run(True, 0.12, goals)[0], run(False, 0.12)[0]

    def first(check, goal):
        points = zip(check.curve["step"], check.curve["val_error"], strict=True)
        return next((step for step, error in points if Goal(goal, 2, 60).is_reached(error)), None)

    met = [first(full, goal) for goal in goals]
    assert None not in met and len(set(met)) == 2, "the goals are met one after the other"
    assert [first(early, goal) for goal in goals] == met
    exact = [step for step, e in zip(early.curve["step"], early.curve["exact"], strict=True) if e]
    assert set(met) <= set(exact)


def test_a_refusal_looks_at_the_hardest_examples_first():
    _, module, data = run(False, 0.001, steps=40)
    trainer = fit(module, callbacks=[], datamodule=data, max_steps=1, limit_val_batches=0)
    check = EarlyValidation(trainer, module)
    module.eval()
    mistakes = int((module.per_example_error((data.x, data.y)) >= 1).sum())
    assert check(N) == (mistakes, True)
    data.looked_at = 0
    refused = check(mistakes // 2)
    assert not refused.exact and refused.mistakes > mistakes // 2
    assert data.looked_at <= max(CHUNK, mistakes // 2 + 1)
    assert check(mistakes) == (mistakes, True), "as many as are allowed"
    assert not check(mistakes - 1).exact or mistakes == 0


def test_an_ignored_class_is_refused():
    data, module = Points(), classifier()
    trainer = fit(module, callbacks=[], datamodule=data, max_steps=1, limit_val_batches=0)
    data.y[-1] = -100
    with refuses("data", "a split with the class -100"):
        EarlyValidation(trainer, module)(N)


def test_without_what_it_needs_full_passes_are_taken():
    class Own(ImageClassifier):
        """Counts every example as right, in its own way."""

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self._mistakes *= 0

    check = GoalErrorCallback(0.01, 2, 4, early_reject=True)
    fit(Own(classifier().network), callbacks=[check], datamodule=Points())
    assert (check.status, check.steps_to_result, check.curve["val_error"]) == (
        Status.COMPLETE,
        2,
        [0.0],
    )
    assert "exact" not in check.curve

    plain = GoalErrorCallback(0.001, 2, 4, early_reject=True)
    fit(ImageClassifier(nn.Linear(4, 3)), loader(), loader(), callbacks=[plain])  # no data module
    assert plain.curve["step"] == [2, 4] and "exact" not in plain.curve


class Margin(ImageClassifier):
    """Judges a prediction as wrong unless its probability is above 0.8; has its own val_loss."""

    def per_example_error(self, batch):
        x, y = batch
        return 1.8 - self(x).softmax(1).gather(1, y[:, None])[:, 0]

    def summed_loss(self, batch):
        return 3 * super().summed_loss(batch)


def test_all_loops_count_the_mistakes_of_an_error_of_the_user():
    errors = []
    for early in (True, False):
        module = Margin(classifier().network, learning_rate=0.05)
        goal = GoalErrorCallback(0.999, 2, 2, early_reject=early)  # allows 999: checks are exact
        torch.manual_seed(0)
        fit(module, callbacks=[goal], datamodule=Points())
        assert ("exact" in goal.curve) is early
        errors += goal.curve["val_error"]
    assert errors[0] == errors[1]
    data = Points()
    module.eval()
    probability = module(data.x).softmax(1).gather(1, data.y[:, None])[:, 0]
    wrong = int((probability <= 0.8).sum())
    assert 0 < int((module(data.x).argmax(1) != data.y).sum()) < wrong < N
    (logged,) = Trainer(**QUIET).validate(module, data.val_dataloader(), verbose=False)
    assert logged["val_error"] == pytest.approx(wrong / N)
    loss = float(nn.functional.cross_entropy(module(data.x), data.y))
    assert logged["val_loss"] == pytest.approx(3 * loss)


def test_a_module_that_counts_by_itself_logs_the_mean_loss():
    class Counts(ImageClassifier):
        """Its loss has as many terms as it counts examples."""

        def validation_step(self, batch, batch_idx):
            x, y = batch
            logits = self(x)
            self._mistakes += (logits.argmax(1) != y).sum()
            self._loss += nn.functional.cross_entropy(logits, y, reduction="sum").double()
            self._seen += len(y)

    data = Points()
    module = Counts(classifier().network).eval()
    (logged,) = Trainer(**QUIET).validate(module, data.val_dataloader(), verbose=False)
    loss = float(nn.functional.cross_entropy(module(data.x), data.y))
    assert logged["val_loss"] == pytest.approx(loss)


def test_the_loss_of_a_language_is_a_mean_over_positions_also_if_errors_judge_windows():
    class Windows(LanguageModel):
        def setup(self, stage):
            pass

        def per_example_error(self, batch):
            x, y = batch
            return (self(x).argmax(1) != y).any(1).float()

    y = torch.arange(24).view(6, 4) % 3
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(y.float()[:, None], y), 4)
    torch.manual_seed(1)
    module = Windows(nn.Conv1d(1, 3, 1))
    logits = module(y.float()[:, None])
    loss = float(nn.functional.cross_entropy(logits, y))
    error = float((logits.argmax(1) != y).any(1).float().mean())
    trainer = Trainer(**QUIET)
    for split, (logged,) in (
        ("val", trainer.validate(module, data, verbose=False)),
        ("test", trainer.test(module, data, verbose=False)),
    ):
        assert logged[f"{split}_loss"] == pytest.approx(loss)
        assert logged[f"{split}_error"] == pytest.approx(error)


def test_a_full_check_counts_by_the_former_name_of_the_error_too():
    class NamedBefore(ImageClassifier):
        def wrongness(self, batch):
            return torch.ones(len(batch[1]))

    goal = GoalErrorCallback(0.5, 2, 2)
    fit(NamedBefore(classifier().network), callbacks=[goal], datamodule=Points())
    assert goal.curve["val_error"] == [1.0]


def test_an_error_of_nan_is_a_mistake():
    class Broken(ImageClassifier):
        def per_example_error(self, batch):
            return torch.full((len(batch[1]),), torch.nan)

    for early in (True, False):
        goal = GoalErrorCallback(0.5, 2, 2, early_reject=early)
        fit(Broken(classifier().network), callbacks=[goal], datamodule=Points())
        assert goal.status is Status.INCOMPLETE
        assert goal.curve["val_error"][0] > 0.5


@pytest.mark.parametrize("error", [0.02, 0.12, 0.14, 0.4, 0.08, 1 / 3])
@pytest.mark.parametrize("examples", [150, 5000, 6000, 7])
def test_allowed_mistakes_are_the_most_that_meet_the_goal(error, examples):
    goal = Goal(error)
    allowed = goal.max_mistakes(examples)
    as_logged = torch.tensor([allowed, allowed + 1]).float() / examples
    assert [goal.is_reached(float(e)) for e in as_logged] == [True, False]


class OwnSplit(Points):
    def val_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(self.x[:10], self.y[:10]), 10
        )


class OwnHook(ImageClassifier):
    def on_validation_start(self):
        pass


class Averaging(Callback):
    def on_validation_epoch_start(self, trainer, pl_module):
        pass


def supports(module=ImageClassifier, data=Points, monitor="val_error", callbacks=()) -> bool:
    trainer = Trainer(**QUIET, callbacks=list(callbacks))
    trainer.datamodule = data()
    return EarlyValidation.supports(trainer, module(nn.Linear(4, 2)), monitor)


def test_it_stands_in_only_where_lightnings_validation_would_say_the_same():
    assert supports()
    assert not supports(data=OwnSplit), "its validation data are others"
    assert not supports(module=OwnHook) and not supports(callbacks=[Averaging()]), (
        "somebody listens"
    )
    assert not supports(monitor="val_loss"), "mistakes are no loss"
