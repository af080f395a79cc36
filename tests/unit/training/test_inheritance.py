"""Methods that are set on an instance, or patched in our own class, decide on training like those
of a subclass."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_dps.core.trial import Cell
from lit_dps.data import Digits, ImageData
from lit_dps.data.loaders import EndlessLoader, batches
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.module import ImageClassifier
from lit_dps.training.inheritance import adopt_former_methods, decides, inherits
from tests.support.runs import train
from tests.support.setups import training_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import GOAL, trials, workload

BRIEF = {**GOAL, "max_steps": 12, "check_interval": 4}


def first_examples(data: ImageData) -> EndlessLoader:
    """Batches of the first 64 examples alone."""
    return EndlessLoader(
        lambda: batches((epoch[epoch < 64] for epoch in data.epochs()), data.batch_size)
    )


class Loading(Digits):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.train_dataloader = lambda: first_examples(self)


class Inverting(Digits):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        transfer = self.transfer_batch_to_device

        def inverted(batch, device, dataloader_idx=0):
            x, y = transfer(batch, device, dataloader_idx)
            return -x, y

        self.transfer_batch_to_device = inverted


class Doubling(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.training_step = lambda batch, batch_idx: 2 * self.loss(batch)


class Margin(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.loss = lambda batch: nn.functional.multi_margin_loss(self(batch[0]), batch[1])


class Halving(ImageClassifier):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.configure_optimizers = lambda: torch.optim.SGD(
            self.parameters(), lr=self.hparams.learning_rate / 2
        )


class Lenient(ImageClassifier):
    """Counts no mistake of the class 0."""

    def __init__(self, **arguments):
        super().__init__(**arguments)

        def validation_step(batch, batch_idx):
            x, y = batch
            self._mistakes += ((self(x).argmax(1) != y) & (y > 0)).sum()
            self._seen += y.numel()

        self.validation_step = validation_step


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (None, "Loading"),
        (None, "Inverting"),
        ("Doubling", None),
        ("Margin", None),
        ("Halving", None),
        ("Lenient", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_method_of_the_instance_is_taken_by_all_engines(model, data, size):
    here, asked = (
        "tests.unit.training.test_inheritance.",
        trials(Cell(16, 0.0), Cell(16, 0.8), rates=[0.02, 0.05]),
    )
    used = workload(class_path=here + model) if model else workload()
    if data:
        used = replace(used, data={"class_path": here + data, "init_args": {}})
    usual = train(asked, workload(), BRIEF, lean=False)
    lightning = train(asked, used, BRIEF, lean=False)
    ours = train(asked, used, BRIEF, size=size)
    assert [r.curve for r in lightning] != [r.curve for r in usual], "the method decides on results"
    if not any("stacked" in r.flags for r in ours):
        assert [replace(r, seconds=0) for r in ours] == [replace(r, seconds=0) for r in lightning]
        return
    for one, other in zip(sorted(ours, key=str), sorted(lightning, key=str), strict=True):
        assert one.curve["train_loss"] == pytest.approx(other.curve["train_loss"], rel=1e-4)


PATCHES = [
    (ImageData, "train_dataloader", first_examples),
    (ImageData, "val_dataloader", lambda data: data._in_order("test")),
    (ImageClassifier, "training_step", lambda module, batch, batch_idx: 2 * module.loss(batch)),
    (ImageClassifier, "on_train_batch_end", lambda module, *args: None),
]


@pytest.mark.parametrize(("owner", "name", "method"), PATCHES, ids=[name for _, name, _ in PATCHES])
def test_a_patch_of_our_own_class_is_left_to_lightning(owner, name, method, monkeypatch):
    trial = trials(Cell(16, 0.0), rates=[0.02])[0]
    training = training_of(workload(), {**BRIEF, "early_reject": False})
    assert ineligibility_reason(training, trial) is None
    original = getattr(owner, name)

    @functools.wraps(original)
    def patch(*args):
        return method(*args)

    monkeypatch.setattr(owner, name, patch)
    assert ineligibility_reason(training, trial) is not None
    built = workload().build(trial)
    assert not inherits(built.data if owner is ImageData else built.module, owner, [name])


def test_a_patched_validation_ends_early_checks(monkeypatch):
    module = ImageClassifier(nn.Linear(4, 2))
    assert decides(module, "per_example_error", "validation_step")
    monkeypatch.setattr(ImageClassifier, "validation_step", lambda module, batch, batch_idx: None)
    assert not decides(module, "per_example_error", "validation_step")
    monkeypatch.setattr(ImageClassifier, "per_example_error", lambda module, batch: None)
    assert decides(module, "per_example_error", "validation_step")


def test_the_last_who_overrides_decides():
    module = ImageClassifier(nn.Linear(4, 2))
    module.validation_step = lambda batch, batch_idx: None
    assert not decides(module, "per_example_error", "validation_step")
    module.per_example_error = lambda batch: None
    assert decides(module, "per_example_error", "validation_step")


def test_a_method_with_its_former_name_is_adopted_and_warned_of_once(capsys):
    class Former(ImageClassifier):
        def wrongness(self, batch):
            return super().wrongness(batch) + 1

    module, batch = Former(nn.Identity()), (torch.eye(2), torch.tensor([0, 1]))
    for _ in range(2):
        adopt_former_methods(module)
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1
    assert "Former.wrongness" in warned and "Former.per_example_error" in warned
    assert decides(module, "per_example_error", "validation_step")
    expected = ImageClassifier(nn.Identity()).per_example_error(batch) + 1
    assert torch.equal(module.per_example_error(batch), expected)


def test_a_class_with_both_names_keeps_its_present_method(capsys):
    class Both(ImageClassifier):
        def wrongness(self, batch):
            raise AssertionError

        def per_example_error(self, batch):
            return "present"

    module = Both(nn.Identity())
    adopt_former_methods(module)
    assert module.per_example_error(None) == "present" and capsys.readouterr().err == ""
