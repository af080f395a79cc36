"""Cells that are equal are trained once and shown in each series."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import optuna
import pytest

from lit_dps import Analysis
from lit_dps.analysis.step_seconds import step_seconds
from lit_dps.cli import main
from lit_dps.core.config import StorageConfig
from lit_dps.core.record import grid, shared_cells
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.trial import Cell
from lit_dps.report.notes import finished_trials
from lit_dps.storage.read import read_study
from lit_dps.storage.schema import cell_study_name
from tests.support.fake_study import result, write_study
from tests.unit.study.test_grid import setup

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
METHODS = ("random", "snip")
AXES = {"pruning.method": METHODS, "model.momentum": (0.5, 0.9)}


def cell(sparsity: float, method: str, batch_size: int = 8) -> Cell:
    return Cell(batch_size, sparsity, (("pruning.method", method),))


def test_dense_cells_share_only_what_pruning_alone_tells_apart():
    cells = grid([8, 16], [0.0, 0.5], AXES)
    shared = shared_cells(cells)
    assert len(cells) == 16 and len(shared) == 4
    for copy, source in shared.items():
        assert copy.sparsity == source.sparsity == 0 and copy.batch_size == source.batch_size
        assert dict(copy.axes) == {**dict(source.axes), "pruning.method": "snip"}
        assert dict(source.axes)["pruning.method"] == "random"
    assert shared_cells(grid([8], [0.5], AXES)) == {}
    assert shared_cells(grid([8], [0.0, 0.5])) == {}


def test_a_study_runs_each_of_them_once():
    study = setup({"pruning.method": list(METHODS)}, batch_sizes=[8], sparsities=[0.0, 0.5])
    assert len(study.study.cells) == 4
    assert study.cells == [cell(0.0, "random"), cell(0.5, "random"), cell(0.5, "snip")]


@pytest.fixture
def record():
    trained = cell(0.0, "random")
    results = {
        trained: [result(trained, 0, 40), result(trained, 1, 24)],
        cell(0.5, "random"): [result(cell(0.5, "random"), 0, 64)],
        cell(0.5, "snip"): [result(cell(0.5, "snip"), 0, 48)],
    }
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, results, axes={"pruning.method": list(METHODS)}, trials=2)
    return read_study(storage, "fake")


def test_each_series_shows_the_trials_of_the_cell_that_was_trained(record):
    summaries = Analysis(record).by_cell
    copy, source = summaries[cell(0.0, "snip")], summaries[cell(0.0, "random")]
    assert (copy.k_star, source.k_star) == (24, 24)
    assert [each.trial.cell for each in copy.trials] == [cell(0.0, "snip")] * 2
    assert copy.pending == source.pending == 0
    assert record.shared == {cell(0.0, "snip"): cell(0.0, "random")}
    assert len(finished_trials(Analysis(record))) == 4


def test_a_method_that_is_added_leaves_the_dense_cell_of_the_stored_study(record):
    methods = ["magnitude", "random", "snip"]
    study = setup({"pruning.method": methods}, batch_sizes=[8], sparsities=[0.0, 0.5])
    assert study.cells[0] == cell(0.0, "magnitude")
    extended = study.with_stored_trials(record)
    assert cell(0.0, "random") in extended.cells
    assert cell(0.0, "magnitude") not in extended.cells
    remaining = extended.remaining_points(record.results)
    trained = {0, 1}
    assert remaining[cell(0.0, "random")] == set(range(study.study.trials)) - trained


def test_its_steps_take_as_long(record):
    times = []
    for of_cell in record.trained_cells:
        times.append(CellTiming(of_cell, (0.1 + of_cell.sparsity,), 1.0))
    timing = StepTiming("machine", "2026-11-28", 1, 1, tuple(times))
    seconds = step_seconds(dataclasses.replace(record, step_timing=timing))
    assert seconds[cell(0.0, "snip")].median == pytest.approx(0.1)
    assert seconds[cell(0.5, "snip")].median == pytest.approx(0.6)


def test_cells_that_an_earlier_version_trained_keep_their_trials():
    source, copy = cell(0.0, "random"), cell(0.0, "snip")
    results = {source: [result(source, 0, 40)], copy: [result(copy, 0, 32)]}
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, results, axes={"pruning.method": list(METHODS)})
    record = read_study(storage, "fake")
    assert record.shared == {}
    assert [record.results[each][0].steps for each in (source, copy)] == [40, 32]


def test_a_method_that_precedes_the_stored_one_does_not_train_the_dense_cells_again():
    """In the order of the grid, magnitude precedes random."""
    source, added = cell(0.0, "random"), cell(0.0, "magnitude")
    storage = optuna.storages.InMemoryStorage()
    results = {source: [result(source, 0, 40)], cell(0.5, "random"): []}
    write_study(storage, results, axes={"pruning.method": ["magnitude", *METHODS]}, trials=1)
    record = read_study(storage, "fake")
    assert record.shared == {added: source, cell(0.0, "snip"): source}
    assert record.results[added][0].steps == 40
    extended = setup({"pruning.method": ["magnitude", *METHODS]}, batch_sizes=[8])
    assert added in extended.cells  # of a new study
    extended = dataclasses.replace(extended, shared=record.shared)
    assert [each for each in extended.cells if each.sparsity == 0] == [source]
    # The stored cell is not in this command's grid, so another one is trained.
    other = setup({"pruning.method": ["magnitude", "snip"]}, batch_sizes=[8], sparsities=[0.0])
    assert dataclasses.replace(other, shared=record.shared).cells == [added]


@pytest.mark.long
@pytest.mark.slow
def test_a_study_stores_and_resumes_them_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_DPS_STEP_TIMING", "0")
    arguments = [
        "study",
        f"--config={CONFIG}",
        "--study.name=equal",
        "--study.batch_sizes=[32]",
        "--study.sparsities=[0, 0.5]",
        "--study.grid={pruning.method: [snip, random]}",
        "--study.trials=2",
        "--study.workers=1",
        "--study.noise_scale=false",
        "--storage.mlflow=null",
        "--goal.error=0.3",
        f"--storage.folder={tmp_path}",
    ]
    assert main(arguments) == 0
    url = StorageConfig(folder=str(tmp_path)).optuna_url
    names = {study.study_name for study in optuna.get_all_study_summaries(url)}
    dense = [Cell(32, 0.0, (("pruning.method", method),)) for method in METHODS]
    assert [cell_study_name("equal", each) in names for each in dense] == [True, False]
    record = read_study(url, "equal")
    steps = [[each.steps for each in record.results[of_cell]] for of_cell in dense]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    assert main(arguments) == 0
    assert read_study(url, "equal").results == record.results
