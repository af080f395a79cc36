"""Every part of Lightning that `lightning_private` names is there, and does what its function
says."""

from __future__ import annotations

import inspect
import signal
from importlib import metadata

import lightning
import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lit_dps.training import lightning_private as private
from tests.support.errors import raises_about
from tests.support.tiny import Plain, fit, loader, points


class Uses(Callback):
    """Calls the functions where lit_dps does, within a fit of 2 epochs of 5 batches and of at most
    7 steps."""

    def __init__(self):
        self.seen = {}

    def setup(self, trainer, pl_module, stage):
        private.set_max_steps(trainer, 7)
        private.replace_dataloader(trainer, lambda made: self.seen.setdefault("wrapped", made))
        self.seen["anomalies"] = private.detects_anomalies(trainer)
        self.seen["epochs"] = private.max_epochs(trainer)
        private.set_max_epochs(trainer, 9)

    def on_fit_start(self, trainer, pl_module):
        private.leave_signals_alone(trainer)

    def on_train_start(self, trainer, pl_module):
        self.seen["handler"] = signal.getsignal(signal.SIGTERM)
        self.seen["batches"] = private.batches_of_epoch(trainer)
        self.seen["owner"] = private.owners_of(pl_module)[0] is trainer
        self.seen["before transfer"] = private.before_transfer(pl_module, "batch")

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            private.validate_now(trainer)
            self.seen["logged"] = trainer.callback_metrics["val_error"].item()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen["trained"] = private.batches_trained(trainer)
        if trainer.global_step == 3:
            private.set_global_step(trainer, 4)

    def on_validation_end(self, trainer, pl_module):
        self.seen["metrics"] = [metric.meta.name for metric in private.logged_metrics(trainer)]

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.setdefault("begun", []).append(private.epochs_with_next(trainer))

    def on_train_end(self, trainer, pl_module):
        self.seen["steps"], self.seen["limit"] = trainer.global_step, trainer.max_steps


@pytest.fixture(scope="module")
def uses() -> tuple:
    callback = Uses()
    module = Plain(errors=(0.5,))
    trainer = fit(
        module, loader(20, 4), loader(20, 4), callbacks=[callback], check_val_every_n_epoch=100
    )
    return callback.seen, module, trainer


def test_it_was_written_for_this_version():
    assert lightning.__version__.startswith(f"{private.VERSION}."), (
        "go through lightning_private.py with the new one"
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("handler", signal.getsignal(signal.SIGTERM)),
        ("anomalies", False),
        ("epochs", -1),
        ("batches", 5),
        ("owner", True),
        ("before transfer", "batch"),
        ("logged", 0.5),
        ("trained", (1, 0)),
        ("metrics", ["val_error"]),
        ("begun", [2, 3]),
        ("steps", 7),
        ("limit", 7),
    ],
)
def test_what_is_used_of_lightning_does_what_it_says(uses, what, expected):
    assert uses[0][what] == expected


def test_steps_that_are_put_right_shorten_the_run(uses):
    seen, module, trainer = uses
    assert module.taken == 6, "one of 7 was put in"
    assert seen["wrapped"] is not None
    assert private.set_up_data(trainer) == 5


class ShortensEpochs(Callback):
    """Replaces the train dataloader by its last two batches, and notes what each step is trained
    on."""

    def on_train_start(self, trainer, pl_module):
        private.replace_train_loaders(trainer, lambda whole: (list(whole)[-2:], 2))
        self.length = private.batches_of_epoch(trainer)
        self.trained = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trained.append((trainer.current_epoch, batch[0]))


def test_a_train_dataloader_that_is_replaced_makes_the_epochs():
    shortens, whole = ShortensEpochs(), loader(20, 4)
    fit(Plain(), whole, loader(20, 4), callbacks=[shortens], max_steps=4)
    assert shortens.length == 2
    assert [epoch for epoch, _ in shortens.trained] == [0, 0, 1, 1]
    batches = [x for x, _ in whole]
    for (_, trained), expected in zip(shortens.trained, batches[-2:] * 2, strict=True):
        assert trained.equal(expected)


def test_nobody_else_reaches_into_lightning():
    """Every function here is used, and what it hides is named nowhere else."""
    from pathlib import Path

    files = {path: path.read_text() for path in Path(private.__file__).parents[1].rglob("*.py")}
    others = "\n".join(text for path, text in files.items() if path.name != "lightning_private.py")
    for name, _ in inspect.getmembers(private, inspect.isfunction):
        assert f"lightning_private.{name}(" in others, f"{name} is used by nobody"
    for part in (
        "epoch_loop",
        "_data_source",
        "_signal_connector",
        "._results",
        "_detect_anomaly",
        "._fabric",
    ):
        assert part not in others, f"{part} belongs into lightning_private.py"


def test_a_trainer_has_the_installed_callbacks_and_the_others_look_them_up_again(monkeypatch):
    installed = [metadata.EntryPoint("ours", f"{__name__}:ShortensEpochs", "group")]
    monkeypatch.setattr(private, "_entry_points", lambda group: installed)
    registry = private.registry
    original = registry.entry_points  # pyright: ignore
    trainer = private.make_trainer({"accelerator": "cpu", "logger": False})
    assert any(isinstance(each, ShortensEpochs) for each in private.callbacks_of(trainer))
    assert registry.entry_points is original  # pyright: ignore
    with pytest.raises(TypeError):
        private.make_trainer({"no_argument": 1})
    assert registry.entry_points is original  # pyright: ignore


class Broken(DataLoader):
    """Fails when batches are requested; then the teardown of the trainer fails too."""

    def __iter__(self):
        raise OSError("the disk is gone")


def test_the_error_of_a_fit_is_no_error_of_the_teardown():
    with raises_about(RuntimeError, "combined_loader") as raised:
        fit(Plain(errors=(0.5,)), Broken(points(20), 4), loader(20, 4))
    assert repr(private.error_of_fit(raised.value)) == "OSError('the disk is gone')"
    own = KeyError("of the user")
    assert private.error_of_fit(own) is own
