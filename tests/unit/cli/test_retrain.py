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

HIDDEN = "\r\n"  # axes of earlier versions have such values
AXIS = "model.separator"
CHOICE = "model.end"


class Separated(Net):
    """Knows the texts that it was trained with."""

    trained: ClassVar[list[tuple[str, str, str]]] = []

    def __init__(self, begin: str, separator: str = "", end: str = ""):
        super().__init__(width=4)
        self.texts = (separator, end, begin)

    def on_train_start(self):
        self.trained.append(self.texts)


@pytest.mark.parametrize("name", [HIDDEN, "\\r\n"])
def test_a_value_with_invisible_characters_is_trained_and_not_its_escapes(tmp_path, name):
    """A cell is named by the value, or by the escapes that reports show."""
    study = StudyConfig(
        name="fake",
        trials=1,
        batch_sizes=[16],
        sparsities=[0.0],
        space={CHOICE: {"choices": [HIDDEN, "c"]}},
        grid={AXIS: [HIDDEN, "c"]},
    )
    model = {"class_path": f"{__name__}.Separated", "init_args": {"begin": HIDDEN}}
    defaults = {"n": 160, "drop_last": False, "workers": 0}
    data = {"class_path": "tests.zoo.animals.data.Clouds", "init_args": defaults}
    workload = Workload(model, data, {"accelerator": "cpu"})
    goal = {"error": 0.01, "check_interval": 2, "max_steps": 4}
    setup = setup_of(study, StorageConfig(folder=str(tmp_path)), workload, goal)
    cells = {}
    for cell in study.cells:
        cells[cell] = [result(cell, 0, None, "incomplete", params={CHOICE: HIDDEN})]
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
    command = ("--of", "fake", "--point", "0", "--storage.folder", str(tmp_path), "--trust")
    assert main(["fit", *command, "--cell", f"B=16,S=0,separator={name}"]) == 0
    assert Separated.trained == [(HIDDEN, HIDDEN, HIDDEN)]
