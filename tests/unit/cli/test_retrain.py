"""`fit --of` builds the setup of a stored study again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from lit_dps.cli import main, retrain
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Choices
from lit_dps.storage.read import open_elsewhere, read_study
from lit_dps.training.workload import Workload
from tests.support.fake_study import result, write_study
from tests.support.setups import setup_of
from tests.zoo.animals.models import Net

SHARDS = Path(__file__).parents[3] / "docs" / "replication" / "studies"
DATABASE = SHARDS / "paper-mnist-momentum-levels.db.xz"


@pytest.mark.skipif(not DATABASE.exists(), reason="the database of the replication is missing")
def test_a_study_that_ran_with_the_removed_engine_is_rebuilt():
    with open_elsewhere(str(DATABASE), "sqlite:///none.db") as stored:
        record = read_study(stored.storage, "paper-mnist-momentum-levels")
    assert record.config["study"]["engine"] == "single"
    # A text that looks like a number remains a text.
    study = {**record.config["study"], "space": {"model.tag": {"choices": ["1e3", "a"]}}}
    record = replace(record, config={**record.config, "study": study})
    setup = retrain._rebuilt(record)
    assert setup.study.space == {"model.tag": Choices(["1e3", "a"])}
    assert setup.study.engine == "single"
    assert setup.study.trials == record.trials


# ---- Values with characters that no terminal shows ----

HIDDEN = "\r\n"  # axes and choices of earlier versions have such values
AXIS = "model.separator"
CHOICE = "model.end"
RATE = "model.rate"
METRIC = "val\u200b_error"


class Separated(Net):
    """Knows the texts that it was trained with."""

    trained: ClassVar[list[tuple[str, str, str]]] = []

    def __init__(self, begin: str, separator: str = "", end: str = "", rate: float = 0.1):
        super().__init__(width=4)
        self.texts = (begin, separator, end)

    def on_train_start(self):
        self.trained.append(self.texts)

    def validation_step(self, batch, i):
        x, y = batch
        self.log(METRIC, (self(x).argmax(1) != y).float().mean())


def write_and_retrain(folder: Path, axes: list[str], choices: list[str], cell: str) -> int:
    """Store a study with an incomplete trial per cell, retrain one, and return the exit code."""
    space = {RATE: {"low": 0.1, "high": 1.0}, CHOICE: {"choices": choices}}
    grid = {AXIS: axes}
    study = StudyConfig(
        name="fake", trials=1, batch_sizes=[16], sparsities=[0.0], space=space, grid=grid
    )
    model = {"class_path": f"{__name__}.Separated", "init_args": {"begin": HIDDEN}}
    defaults = {"n": 160, "drop_last": False, "workers": 0}
    data = {"class_path": "tests.zoo.animals.data.Clouds", "init_args": defaults}
    workload = Workload(model, data, {"accelerator": "cpu"})
    goal = {"metric": METRIC, "at_most": 0.01, "check_interval": 2, "max_steps": 4}
    setup = setup_of(study, StorageConfig(folder=str(folder)), workload, goal)
    params = {RATE: 0.5, CHOICE: choices[0]}
    curve = {"step": [2, 4], METRIC: [0.6, 0.5], "train_loss": [1.0, 1.0]}
    cells = {}
    for stored in study.cells:
        cells[stored] = [result(stored, 0, None, "incomplete", params=params, curve=curve)]
    write_study(
        setup.storage.optuna_url,
        cells,
        space=setup.study.space,
        axes=setup.study.axes,
        goal=setup.built_goal,
        identity=setup.identity(None),
        config=setup.config(),
    )
    Separated.trained.clear()
    command = ("--of", "fake", "--point", "0", "--storage.folder", str(folder), "--trust")
    return main(["fit", *command, "--cell", f"B=16,S=0,separator={cell}"])


def test_a_fixed_argument_and_a_metric_may_have_invisible_characters(tmp_path, capsys):
    """The stored curve has the metric too."""
    assert write_and_retrain(tmp_path, ["b", "c"], ["d", "e"], "b") == 0
    assert Separated.trained == [(HIDDEN, "b", "d")]
    assert "val\\u200b_error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("axes", "choices", "cell", "key"),
    [
        ([HIDDEN, "c"], ["d", "e"], HIDDEN, f"study.grid.{AXIS}"),
        ([HIDDEN, "c"], ["d", "e"], "\\r\n", f"study.grid.{AXIS}"),
        (["b", "c"], [HIDDEN, "e"], "b", f"study.space.{CHOICE}.choices"),
    ],
)
def test_axes_and_choices_with_invisible_characters_are_refused(
    tmp_path, capsys, axes, choices, cell, key
):
    """Reports name such a cell by escapes."""
    assert write_and_retrain(tmp_path, axes, choices, cell) == 2
    error = capsys.readouterr().err
    assert f"{key} is '\\r\\n'; it must be a text without invisible characters" in error
    assert Separated.trained == []
