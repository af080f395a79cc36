"""Callbacks and loggers, from the configuration and from the module itself."""

from __future__ import annotations

import pytest

from lit_dps.core.exit_codes import ExitCode
from tests.zoo.animals.callbacks import Counter
from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

LIGHTNING = "lightning.pytorch.callbacks."
ONE = {"batch_sizes": [32], "goal": {"monitor": "val_loss", "error": 1e-6, "max_steps": 20}}
WORK = [("LearningRateMonitor", {}), ("DeviceStatsMonitor", {"cpu_stats": False})]
IDLE = [
    ("ModelSummary", {"max_depth": 1}),
    ("ModelCheckpoint", {"monitor": "val_loss", "save_last": True}),
    ("ModelCheckpoint", {"every_n_train_steps": 5, "dirpath": "kept"}),
    ("TQDMProgressBar", {"refresh_rate": 1}),
    ("RichProgressBar", {}),
]


def by_trainer(name: str, options: dict) -> dict:
    return all_by_trainer([(name, options)])


def all_by_trainer(callbacks: list[tuple[str, dict]]) -> dict:
    specs = [{"class_path": LIGHTNING + name, "init_args": init} for name, init in callbacks]
    return {"trainer": {"callbacks": specs}}


def by_module(name: str, options: dict) -> dict:
    return {"model": spec("steps.BringsCallbacks", callback=name, options=options)}


def rich_or_skip(name: str) -> None:
    if name.startswith("Rich"):
        pytest.importorskip("rich")


@pytest.mark.long
def test_several_that_watch_do_so_together(zoo):
    outcome = zoo(**all_by_trainer(WORK), **ONE)
    assert_works(outcome)
    for result in outcome.results:
        assert {name for name, _ in WORK} <= set(outcome.audit(result).callbacks)


@pytest.mark.long
@pytest.mark.parametrize("way", [by_trainer, by_module])
@pytest.mark.parametrize(("name", "options"), WORK, ids=[name for name, _ in WORK])
def test_those_that_watch(zoo, way, name, options):
    outcome = zoo(**way(name, options), **ONE)
    assert_works(outcome)
    assert name == "ModelSummary" or all(
        name in outcome.audit(result).callbacks for result in outcome.results
    )


# A trainer has one progress bar.
@pytest.mark.parametrize(
    "bar", [pytest.param("TQDMProgressBar", marks=pytest.mark.long), "RichProgressBar"]
)
def test_several_that_would_save_or_draw_do_nothing_together(zoo, bar):
    rich_or_skip(bar)
    others = [each for each in IDLE if not each[0].endswith("ProgressBar")]
    chosen = others if bar.startswith("Rich") else []
    outcome = zoo(**all_by_trainer([*chosen, (bar, dict(IDLE)[bar])]), **ONE)
    assert_nothing_saved_or_drawn(outcome)


@pytest.mark.long
@pytest.mark.parametrize("way", [by_trainer, by_module])
@pytest.mark.parametrize(
    ("name", "options"), IDLE, ids=["summary", "best", "periodic", "bar", "rich bar"]
)
def test_those_that_would_save_or_draw_do_nothing(zoo, way, name, options):
    rich_or_skip(name)
    assert_nothing_saved_or_drawn(zoo(**way(name, options), **ONE))


def assert_nothing_saved_or_drawn(outcome) -> None:
    assert_works(outcome)
    assert list(outcome.folder.rglob("*.ckpt")) == [] and not (outcome.folder / "kept").exists()
    assert (
        "it/s" not in outcome.out + outcome.err
        and "Trainable params" not in outcome.out + outcome.err
    )


@pytest.mark.parametrize("way", [by_trainer, by_module])
def test_those_that_stop(zoo, way):
    assert_refused(zoo(**way("EarlyStopping", {"monitor": "val_loss"}), **ONE), "EarlyStopping")


def test_a_callback_of_the_user(zoo, monkeypatch):
    monkeypatch.setattr(Counter, "batches", 0)
    monkeypatch.setattr(Counter, "checks", [])
    callbacks = [{"class_path": "tests.zoo.animals.callbacks.Counter"}]
    outcome = zoo(trainer={"callbacks": callbacks}, **ONE)
    assert_works(outcome)
    assert Counter.batches >= 2 * 20
    assert Counter.checks[-8:] == [5, 10, 15, 20] * 2


def test_another_list_of_callbacks_is_another_study(zoo):
    counter = {"class_path": "tests.zoo.animals.callbacks.Counter"}
    assert_works(zoo(trainer={"callbacks": [counter]}, **ONE))
    assert zoo(trainer={"callbacks": [counter]}, **ONE).code == ExitCode.NO_RESULT
    for other in ({}, {"callbacks": [counter, {"class_path": f"{LIGHTNING}ModelSummary"}]}):
        refused = zoo(trainer=other, **ONE)
        assert refused.code == 2, refused.out
        assert (
            refused.err.count("\n") == 1 and "trainer" in refused.err and "callbacks" in refused.err
        )


def test_a_module_may_talk_to_its_logger(zoo):
    outcome = zoo("steps.Logs", **ONE)
    assert_works(outcome)
    assert {path.name for path in outcome.folder.iterdir()} <= {"zoo.yaml", "mlruns"}
