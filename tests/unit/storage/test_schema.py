"""The page of the schema names all that is stored, also by earlier versions; a grid may have
further axes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.cells import open_cell
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import declare, extend
from lit_dps.storage.read import open_elsewhere
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import AXES, cells_of
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.take_over import claim_report
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.runs import trials_of

SHARDS = Path(__file__).parents[3] / "docs" / "replication" / "studies"
DATABASES = sorted(SHARDS.glob("*.db.xz"))
SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
METHODS = {"pruning.method": ["snip", "synflow"], "model.width": [8]}


def check(storage) -> int:
    """Checks that the page names all user study_attributes of a storage. Returns how many trials it
    holds."""
    trials = 0
    for study in storage.get_all_studies():
        attrs = storage.get_study_user_attrs(study._study_id)
        of_cell = " | " in study.study_name
        _check_table(attrs, schema.CELL_ATTRS if of_cell else schema.HEADER_ATTRS)
        for trial in storage.get_all_trials(study._study_id, deepcopy=False):
            _check_table(trial.user_attrs, schema.TRIAL_ATTRS if of_cell else schema.OUTCOME_ATTRS)
            trials += of_cell
            if trial.state.is_finished() and "result" in trial.user_attrs:
                result = trial.user_attrs["result"]
                _check_table(result, schema.RESULT_KEYS)
                assert trial.state is schema.STATES[Status(result["status"])]
    return trials


def _check_table(values, table) -> None:
    assert values.keys() <= table.keys()
    schema.check_keys(values, table)


def test_the_page_names_all_that_a_study_stores(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    config = StudyConfig(
        name="s", batch_sizes=[4], sparsities=[0.0], trials=2, space=SPACE, repeats=1
    )
    _, uid = declare(url, config, "digits", Goal(0.1, 16, 96), {}, {})
    worker = TrialQueue(
        url, "s", [Cell(4)], 2, SobolSampler(SPACE, 0), 0, AttemptRules(Goal(0.1)), uid=uid
    )
    for trial, status in zip(trials_of(worker), (Status.COMPLETE, Status.FAILED), strict=False):
        worker.store_result(
            TrialResult(trial, status, 16 if status is Status.COMPLETE else None, failure="no")
        )
    assert claim_report(url, "s") is None
    assert check(open_storage(url)) == 2
    header = study_attributes(open_storage(url), "s")
    always = {key for key, stored in schema.HEADER_ATTRS.items() if not stored.absent}
    assert header.keys() == always, "what the page names is stored"
    schema.check_keys(header, schema.HEADER_ATTRS)


@pytest.mark.skipif(not DATABASES, reason="the databases of the replication are not there")
@pytest.mark.long
@pytest.mark.parametrize("file", DATABASES, ids=lambda file: file.name)
def test_the_page_names_all_that_the_replication_stores(file):
    with open_elsewhere(str(file), "sqlite:///none.db") as other:
        assert check(other.storage) > 10


def test_further_axes_multiply_the_cells_and_are_extended(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    attrs = {
        "batch_sizes": [4, 2],
        "sparsities": [0.5],
        "axes": {},
        "trials": 1,
        "goals": [],
        "race_factor": None,
        "repeats": {"count": 0, "points": 1, "race_factor": None},
        "space_history": [],
    }
    assert extend(storage, "s", attrs)[AXES] == {}
    extend(storage, "t", attrs | {AXES: METHODS})
    header = extend(
        storage,
        "t",
        attrs | {AXES: {"pruning.method": ["random", "snip"], "model.width": [16, 8.5]}},
    )
    assert header[AXES] == {
        "pruning.method": ["random", "snip", "synflow"],
        "model.width": [8, 8.5, 16],
    }
    cells = cells_of(header)
    assert len(cells) == len(set(cells)) == 2 * 3 * 3
    assert Cell(2, 0.5, (("model.width", 8.5), ("pruning.method", "snip"))) in cells
    assert cells_of(study_attributes(storage, "s")) == [Cell(2, 0.5), Cell(4, 0.5)]


def test_a_cell_says_where_it_stands_on_every_axis(tmp_path):
    storage, others = open_storage(f"sqlite:///{tmp_path}/study.db"), (("pruning.method", "snip"),)
    for cell in (Cell(4, 0.5, others), Cell(4, 0.5)):
        open_cell(storage, "s", cell, "uid")
    names = optuna.get_all_study_names(storage)
    assert sorted(names) == ["s | B=4 S=0.5", "s | B=4 S=0.5 method=snip"]
    found = [study_attributes(storage, name) for name in sorted(names)]
    plain = {"batch_size": 4, "sparsity": 0.5, AXES: {}, "uid": "uid"}
    assert found == [plain, plain | {AXES: {"pruning.method": "snip"}}]


def test_reading_a_study_imports_no_mlflow():
    code = """
import sys
import lit_dps.storage.merge, lit_dps.storage.read, lit_dps.storage.trial_queue
assert "mlflow" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)
