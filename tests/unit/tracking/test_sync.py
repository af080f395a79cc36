"""MLflow while a study runs, and brought in step with one that is stored."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import mlflow
import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli import main
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.storage.read import read_study
from lit_dps.tracking.runs import LoggedAttempt
from lit_dps.tracking.sync import MlflowSync, unstored_trials
from tests.support.fake_study import GOAL, law_study, result, write_study
from tests.support.texts import numbers_in


class Away(MlflowSync):
    """An optional MLflow that goes away and comes back."""

    def __init__(self):
        super().__init__("", "", "", "", {}, is_optional=True)
        self._open = self._connect
        self.there, self.connected, self.trials, self.outcomes = True, 0, [], 0

    def _connect(self):
        self._check()
        self.connected += 1
        return SimpleNamespace(experiment_id="1")

    def logged(self):
        self._ask()
        return {
            (str(r.trial.cell), r.trial.point, 0): LoggedAttempt(r.attempt, r.status, r.seconds)
            for r in self.trials
        }

    def show_running(self):
        self._ask()

    def log_trial(self, result):
        self._ask()
        self.trials.append(result)

    def log_trials(self, results):
        for done, each in enumerate(results, 1):
            self.log_trial(each)
            yield done

    def log_cell(self, *args):
        self._ask()

    def describe(self, *args):
        self._ask()

    def report_page(self):
        return "report.html"

    def log_study(self, *args, **kw):
        self._ask()
        self.outcomes += 1

    def _ask(self):
        self._check()
        assert self.runs is not None  # connects

    def _check(self):
        if not self.there:
            raise StorageError("MLflow at http://x: gone")


@pytest.fixture
def record(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    cell = Cell(16, 0.0)
    params = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    write_study(
        url,
        {cell: [result(cell, point, 32, params=params, seconds=1.0 + point) for point in range(3)]},
        "s",
    )
    return read_study(url, "s")


def test_mlflow_that_is_not_there_is_told_once_and_tried_again_at_the_end(record, capsys):
    mlflow_, results = Away(), record.results[Cell(16, 0.0)]
    mlflow_.there = False
    view = mlflow_
    view.sync(record, is_running=True)
    for r in results:
        view.log_result(r)
    assert view.experiment_id is None
    mlflow_.there = True
    view.sync(record, Analysis(record), [])
    assert (mlflow_.connected, mlflow_.trials, mlflow_.outcomes) == (1, results, 1)
    said = capsys.readouterr().err
    assert said.count("warning") == said.count("gone") == 1


def test_mlflow_that_goes_away_is_not_asked_for_each_trial(record, capsys):
    mlflow_, results = Away(), record.results[Cell(16, 0.0)]
    view = mlflow_
    view.sync(dataclasses.replace(record, results={}), is_running=True)
    view.log_result(results[0])
    mlflow_.there = False
    view.log_result(results[1])
    mlflow_.there = True
    view.log_result(results[2])
    assert mlflow_.trials == results[:1]
    mlflow_.there = False
    view.sync(record, Analysis(record), [])
    assert view.experiment_id is None and mlflow_.outcomes == 0
    assert capsys.readouterr().err.count("warning") == 1


def trials(folder, experiment="digits") -> dict:
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id], "tags.`lit_dps.kind` = 'trial'"
    )
    points = [(run.data.tags["lit_dps.cell"], int(run.data.tags["lit_dps.point"])) for run in found]
    assert len(points) == len(set(points)), "a point has two runs"
    return {point: run.data.metrics["seconds"] for point, run in zip(points, found, strict=True)}


def test_a_result_is_logged_once_by_two_processes_and_one_put_back_is_replaced(tmp_path, record):
    uri, cell = f"sqlite:///{tmp_path}/mlflow.db", Cell(16, 0.0)
    one, other = (MlflowSync(uri, str(tmp_path), "digits", "s", {}) for _ in range(2))
    assert one.runs.run_id == other.runs.run_id
    for tracker in (one, other):
        tracker.sync(record)
    first, *_ = record.results[cell]
    other.log_trial(first)
    assert trials(tmp_path) == {(str(cell), point): 1.0 + point for point in range(3)}

    # the database was put back to a copy without points 1 and 2; point 1 was run again
    again = dataclasses.replace(record, results={cell: [first, result(cell, 1, 32, seconds=9.0)]})
    one.sync(again)
    assert trials(tmp_path) == {(str(cell), 0): 1.0, (str(cell), 1): 9.0, (str(cell), 2): 3.0}
    logged = one.logged()
    assert {(on, point): shown.seconds for (on, point, _), shown in logged.items()} == trials(
        tmp_path
    )
    one.sync(again, logged=logged, obsolete=unstored_trials(logged, again))
    assert trials(tmp_path) == {(str(cell), 0): 1.0, (str(cell), 1): 9.0}


def test_runs_of_an_earlier_version_are_those_of_their_trials(tmp_path):
    """Earlier versions cut a batch schedule at its last dot."""
    cell = Cell(16, 0.0, (("batch.schedule", "0:B/4 2.5%:B/2 10%:B"),))
    tag = "B=16 S=0 schedule=5%:B/2 10%:B"
    tracker = MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "digits", "s", {})
    tags = {"lit_dps.cell": tag, "lit_dps.kind": "cell"}
    earlier = tracker.runs.find_or_create(tags, tag, {})
    tracker.log_trial(result(cell, 0, 32, seconds=1.0))
    assert tracker.logged().keys() == {(tag, 0, 0)}
    client = tracker.runs.client
    (trial,) = tracker.runs.find({"lit_dps.kind": "trial"})
    assert trial.data.tags["mlflow.parentRunId"] == earlier
    tracker.log_cell(cell, {"K_star": 32.0})
    assert client.get_run(earlier).data.metrics == {"K_star": 32.0}
    # The same trial with other seconds replaces its run.
    tracker.log_trial(result(cell, 0, 32, seconds=2.0))
    assert trials(tmp_path) == {(tag, 0): 2.0}


def test_the_race_limit_changes_the_status_of_a_logged_trial(tmp_path):
    """Point 0 met the goal at 900 steps before point 1 met it at 200: it counts as outraced."""
    url, cell = f"sqlite:///{tmp_path}/study.db", Cell(16, 0.0)
    params = {"model.learning_rate": 0.1, "model.momentum": 0.9}

    def met(point: int, steps: int):
        curve = {"step": list(range(100, steps + 1, 100))}
        curve["val_error"] = [0.5] * (len(curve["step"]) - 1) + [0.1]
        return result(cell, point, steps, params=params, curve=curve, seconds=1.0 + point)

    write_study(url, {cell: [met(0, 900), met(1, 200)]}, "s", race_factor=2.0)
    tracker = MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "digits", "s", {})
    for raw in read_study(url, "s", truncates=False).results[cell]:
        tracker.log_trial(raw)
    for _ in range(2):
        tracker.sync(read_study(url, "s"))
        shown = {}
        for run in tracker.runs.find({"lit_dps.kind": "trial"}):
            status, point = run.data.tags["lit_dps.status"], run.data.tags["lit_dps.point"]
            shown[point] = (status, run.data.metrics.get("steps_to_result"))
        assert shown == {"0": ("outraced", None), "1": ("complete", 200)}


def test_attempts_are_told_apart_by_their_number(tmp_path):
    """Earlier versions logged no number: seconds alone tell. A database that was put back gives
    numbers once more."""
    tracker, cell = (
        MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "digits", "s", {}),
        Cell(16, 0.0),
    )

    def attempt(point: int, number: int | None, seconds: float = 60.0):
        return dataclasses.replace(result(cell, point, 32, seconds=seconds), attempt=number)

    def runs() -> dict:
        found = tracker.runs.client.search_runs(
            [tracker.runs.experiment_id], "tags.`lit_dps.kind` = 'trial'"
        )
        return {
            run.data.tags["lit_dps.point"]: (run.data.tags.get("lit_dps.attempt"), run.info.run_id)
            for run in found
        }

    for stored in (attempt(0, 3), attempt(1, None)):
        tracker.log_trial(stored)
    before = runs()
    for number, seconds, anew in ((3, 60.0, False), (7, 60.0, True), (7, 61.0, True)):
        record = SimpleNamespace(
            repeats={}, results={cell: [attempt(0, number, seconds), attempt(1, 4)]}
        )
        tracker.sync(record)
        now = runs()
        assert now["0"][0] == str(number) and (now["0"] != before["0"]) is anew
        assert now["1"] == before["1"] and now["1"][0] is None
        before = now
    assert tracker.logged()[str(cell), 0, 0] == LoggedAttempt(7, "complete", 61.0)


def test_training_seconds_of_a_curve_do_not_replace_the_wall_time(tmp_path):
    """The wall time tells which attempt a run shows, so a second sync must keep the run."""
    cell = Cell(16, 0.0)
    curve = {"step": [16, 32], "val_error": [0.5, 0.1], "seconds": [0.1, 0.2]}
    stored = result(cell, 0, 32, curve=curve, seconds=2.0)
    record = SimpleNamespace(repeats={}, results={cell: [stored]})
    ids = []
    for _ in range(2):
        tracker = MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "digits", "s", {})
        tracker.sync(record)
        (run,) = tracker.runs.find({"lit_dps.kind": "trial"})
        ids.append(run.info.run_id)
    assert ids[0] == ids[1]
    assert (run.data.metrics["seconds"], run.data.metrics["curve/seconds"]) == (2.0, 0.2)
    assert tracker.logged()[str(cell), 0, 0].seconds == 2.0


class Slow(MlflowSync):
    """A server that takes ten seconds for a trial, by a clock that nobody waits for."""

    def __init__(self, clock: list[float], is_optional: bool):
        super().__init__("", "", "", "", {}, is_optional=is_optional)
        self.clock, self.done = clock, 0

    def logged(self) -> dict:
        return {}

    def log_trials(self, results):
        for _ in results:
            self.clock[0] += 10.0
            self.done += 1
            yield self.done


def test_a_slow_server_is_left_after_a_time_limit(monkeypatch, record, capsys):
    clock = [0.0]
    monkeypatch.setattr("lit_dps.tracking.sync.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("lit_dps.tracking.sync.SYNC_SECONDS", 15.0)
    slow = Slow(clock, is_optional=True)
    slow.sync(record)
    assert (slow.done, slow.experiment_id) == (2, None)
    err = capsys.readouterr().err
    # Trials that are logged; of the error, the seconds too.
    assert {(1, 3), (2, 3)} <= {tuple(numbers_in(line)[:2]) for line in re.split(r"[\r\n]", err)}
    assert numbers_in(err)[-3:] == [2, 3, 15]
    patient = Slow(clock, is_optional=False)
    patient.sync(record)
    assert patient.done == 3


@pytest.mark.slow
def test_analyze_sync_fills_an_empty_view_and_again_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()
    law_study("sqlite:///mlruns/study.db", "s", trials=2, batch_sizes=(4, 16, 64))
    stored = {(str(c), r.trial.point) for c, rs in _read().results.items() for r in rs}
    assert len(stored) == 6
    command = ["analyze", "--study.name", "s", "--sync"]
    shown = []
    for experiment in ("digits", "digits", "renamed"):
        header = optuna.load_study(study_name="s", storage="sqlite:///mlruns/study.db")
        header.set_user_attr("workload", experiment)
        assert main(command) == 0
        assert "sqlite:///mlruns/mlflow.db" in capsys.readouterr().out
        assert trials("mlruns", experiment).keys() == stored
        client = mlflow.MlflowClient("sqlite:///mlruns/mlflow.db")
        id_ = client.get_experiment_by_name(experiment).experiment_id
        runs = client.search_runs([id_])
        (study,) = [run for run in runs if run.data.tags["lit_dps.kind"] == "study"]
        curve = client.get_metric_history(study.info.run_id, "K_star/S_0")
        assert len({m.step for m in curve}) == len(curve) > 0
        assert study.data.params["goal.error"] == str(GOAL.value)
        assert {"table.txt", "config.yaml"} <= {
            item.path for item in client.list_artifacts(study.info.run_id)
        }
        shown.append({run.info.run_id for run in runs})
    assert shown[0] == shown[1], "nothing was logged anew"


def test_analyze_sync_keeps_the_runs_of_trials_that_must_run_again(tmp_path, capsys):
    """A larger race factor needs more steps of an outraced trial: the record lacks it till then.
    It also lacks a failed trial while it runs again."""
    cell, params = Cell(16, 0.0), {"model.learning_rate": 0.1, "model.momentum": 0.9}
    curve = {"step": [16], "val_error": [0.5]}
    outraced = result(cell, 0, None, "outraced", params=params, curve=curve, seconds=1.0)
    complete = result(cell, 1, 32, params=params, seconds=2.0)
    url = f"sqlite:///{tmp_path}/study.db"
    failed = result(cell, 3, None, "failed", params=params, seconds=4.0)
    results = {cell: [outraced, complete, failed]}
    write_study(url, results, "s", race_factor=2.0, running={cell: 1})  # point 3
    assert [each.trial.point for each in read_study(url, "s").results[cell]] == [1]
    storage = StorageConfig(folder=str(tmp_path))
    workload = read_study(url, "s").workload
    tracker = MlflowSync.of_study(storage, workload, "s", {})
    lost = result(cell, 2, 32, params=params, seconds=3.0)  # is not stored
    for each in (outraced, complete, lost, failed):
        tracker.log_trial(each)
    assert main(["analyze", "--study.name", "s", "--sync", "--storage.folder", str(tmp_path)]) == 0
    seconds = {point: each for (_, point), each in trials(tmp_path, workload).items()}
    assert seconds == {0: 1.0, 1: 2.0, 3: 4.0}


def test_an_expanded_search_space_replaces_the_logged_one(tmp_path, record):
    tracker = MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "digits", "s", {})
    wide = {**record.space, "model.learning_rate": Range(1e-5, 10.0, "log")}
    for space, low in ((record.space, "0.001"), (wide, "1e-05")):
        record = dataclasses.replace(record, space=space)
        tracker.sync(record, Analysis(record))
        run = tracker.runs.client.get_run(tracker.runs.run_id).data
        first, second = run.tags["lit_dps.space"].splitlines()
        assert first == f"model.learning_rate: [{low}, 10] log"
        assert second == "model.momentum: [0.5, 0.999] reverse_log"
        assert not run.params.keys() & record.space.keys()


def _read():
    return read_study("sqlite:///mlruns/study.db", "s")


def test_analyze_sync_without_mlflow_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()
    law_study("sqlite:///mlruns/study.db", "s", trials=1, batch_sizes=(4,))
    (tmp_path / "other.db").write_text("no database at all")
    assert (
        main(["analyze", "--study.name", "s", "--sync", "--storage.mlflow", "sqlite:///other.db"])
        == 2
    )
    said = capsys.readouterr()
    assert "sqlite:///other.db" in said.err
    assert said.err.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*")} == {"mlruns", "study.db", "other.db"}
