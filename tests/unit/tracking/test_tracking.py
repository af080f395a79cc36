"""What MLflow is told, read back through its own client."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from lit_dps.core.errors import StorageError
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.tracking.client import experiments
from lit_dps.tracking.pages import page_address
from lit_dps.tracking.runs import LoggedAttempt
from lit_dps.tracking.sync import MlflowSync
from tests.support.errors import refuses

CELL = Cell(16, 0.9)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database whose tables are made, which takes MLflow seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    tracker(folder).logged()
    return folder


def tracker(folder, study="s") -> MlflowSync:
    return MlflowSync(
        f"sqlite:///{folder}/mlflow.db", str(folder), "workload", study, {"version.torch": "2"}
    )


def result(point: int, status=Status.COMPLETE, checks=3, **kw) -> TrialResult:
    steps = [16 * (i + 1) for i in range(checks)]
    curve = {"step": steps, "val_error": [1 / s for s in steps], "train_loss": [2.0] * checks}
    trial = Trial(CELL, point, {"model.learning_rate": 0.1})
    done = steps[-1] if status is Status.COMPLETE else None
    return TrialResult(trial, status, done, curve, kept={"net.weight": (3, 30)}, seconds=60.0, **kw)


def runs(folder, kind, study="s"):
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("workload").experiment_id
    return client, client.search_runs(
        [experiment], f"tags.`lit_dps.kind` = '{kind}' and tags.`lit_dps.study` = '{study}'"
    )


def test_a_trial_has_its_curves_parameters_status_and_kept_weights(empty):
    tracker(empty, "one").log_trial(result(3))
    client, (run,) = runs(empty, "trial", "one")
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "batch_size": "16",
        "sparsity": "0.9",
        "point": "3",
        "model.learning_rate": "0.1",
        "total/net.weight": "30",
    }
    assert run.data.metrics["steps_to_result"] == 48
    assert run.data.metrics["kept/net.weight"] == 3
    history = client.get_metric_history(run.info.run_id, "val_error")
    assert [(m.step, m.value) for m in history] == [(16, 1 / 16), (32, 1 / 32), (48, 1 / 48)]
    assert run.data.tags["lit_dps.status"] == "complete"
    assert 59_000 < run.info.end_time - run.info.start_time < 70_000, (
        "the duration shown is the trial's"
    )


def test_runs_are_nested_and_found_again(empty):
    first = tracker(empty, "nested")
    first.log_trial(result(0))
    second = tracker(empty, "nested")  # the study is taken up by another process
    assert second.runs.run_id == first.runs.run_id
    assert second.logged() == {(str(CELL), 0, 0): LoggedAttempt(None, "complete", 60.0)}
    second.log_trial(result(1, Status.INFEASIBLE))
    _, (study,) = runs(empty, "study", "nested")
    _, (cell,) = runs(empty, "cell", "nested")
    _, trials = runs(empty, "trial", "nested")
    assert cell.data.tags["mlflow.parentRunId"] == study.info.run_id
    assert {trial.data.tags["mlflow.parentRunId"] for trial in trials} == {cell.info.run_id}
    assert {(t.data.tags["lit_dps.point"], t.info.status) for t in trials} == {
        ("0", "FINISHED"),
        ("1", "FAILED"),
    }
    assert study.data.tags["version.torch"] == "2"


def test_measurements_of_smoothness_are_metrics_along_training(empty):
    smoothness = {"step": [10, 20], "lipschitz": [4.5, 2.5], "squared_gradient": [0.1, 0.01]}
    flags = {"theory/gradient_variance": 436.0, "theory/loss": 2.9}
    tracker(empty, "smooth").log_trial(result(0, readings={"lipschitz": smoothness}, flags=flags))
    client, (run,) = runs(empty, "trial", "smooth")
    history = client.get_metric_history(run.info.run_id, "lipschitz")
    assert [(m.step, m.value) for m in history] == [(10, 4.5), (20, 2.5)]
    assert run.data.metrics["theory/gradient_variance"] == 436.0


def test_a_point_that_is_run_again_has_one_run(empty):
    tracker(empty, "again").log_trial(result(0, Status.OUTRACED))
    taken_up = tracker(empty, "again")
    taken_up.logged()
    taken_up.log_trial(result(1))
    taken_up.log_trial(result(0))
    _, trials = runs(empty, "trial", "again")
    assert sorted(
        (t.data.tags["lit_dps.point"], t.data.tags["lit_dps.status"]) for t in trials
    ) == [
        ("0", "complete"),
        ("1", "complete"),
    ]


def test_the_run_of_a_point_is_of_the_attempt_that_counts(empty):
    paused = result(0, Status.OUTRACED)
    counts = dataclasses.replace(result(0), seconds=90.0)
    record = SimpleNamespace(repeats={}, results={CELL: [counts, result(1)]})
    for attempts in (
        [paused],
        [counts, paused],
    ):  # killed before the second one was logged; logged a shorter one last
        first = tracker(empty, "attempts")
        first.logged()
        for attempt in attempts:
            first.log_trial(attempt)
        tracker(empty, "attempts").sync(record)
        _, trials = runs(empty, "trial", "attempts")
        found = {
            t.data.tags["lit_dps.point"]: (t.data.tags["lit_dps.status"], t.data.metrics["seconds"])
            for t in trials
        }
        assert found == {"0": ("complete", 90.0), "1": ("complete", 60.0)}
    assert len(trials) == 2
    ids = {t.info.run_id for t in trials}
    tracker(empty, "attempts").sync(record)
    assert {t.info.run_id for t in runs(empty, "trial", "attempts")[1]} == ids, (
        "what is logged stays"
    )


def test_artifacts_keep_their_places_below_their_folder(empty, tmp_path):
    (tmp_path / "goal-0.4").mkdir()
    files = [tmp_path / "table.txt", tmp_path / "goal-0.4" / "table.txt"]
    for file in files:
        file.write_text(file.parent.name)
    t = tracker(empty, "files")
    t.log_study({}, {}, {}, files, {}, finished=True)
    assert {item.path for item in t.runs.client.list_artifacts(t.runs.run_id)} == {
        "goal-0.4",
        "table.txt",
    }
    assert [item.path for item in t.runs.client.list_artifacts(t.runs.run_id, "goal-0.4")] == [
        "goal-0.4/table.txt"
    ]


def test_a_run_that_was_cut_short_is_logged_anew(empty):
    t = tracker(empty, "cut")
    t.log_trial(result(0))
    _, (run,) = runs(empty, "trial", "cut")
    t.runs.client.update_run(run.info.run_id, status="RUNNING")  # as if killed before its end
    assert t.logged() == {}
    t.log_trial(result(0))
    assert len(runs(empty, "trial", "cut")[1]) == 1


def test_more_metrics_than_one_request_takes(empty):
    tracker(empty, "long").log_trial(result(0, checks=900))
    client, (run,) = runs(empty, "trial", "long")
    for name in ("train_loss", "val_error"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [m.step for m in history] == [16 * (i + 1) for i in range(900)]


def test_a_long_curve_is_thinned_and_keeps_both_ends(empty):
    tracker(empty, "thin").log_trial(result(0, checks=4001))
    client, (run,) = runs(empty, "trial", "thin")
    history = client.get_metric_history(run.info.run_id, "val_error")
    steps = [m.step for m in history]
    assert (len(steps), steps[0], steps[-1]) == (1000, 16, 16 * 4001)
    assert {(b - a) // 16 for a, b in itertools.pairwise(steps)} == {4, 5}
    assert all(m.value == 1 / m.step for m in history)


def test_many_trials_are_logged_by_one_search_a_part(empty, monkeypatch):
    t = tracker(empty, "many")
    t.log_trial(result(1))
    t.log_trial(result(2, Status.OUTRACED))  # another attempt at point 2 counts by now
    searches = []
    search = t.runs.client.search_runs
    monkeypatch.setattr(
        t.runs.client,
        "search_runs",
        lambda *args, **kw: searches.append(args) or search(*args, **kw),
    )
    monkeypatch.setattr("lit_dps.tracking.sync.PART", 4)
    results = [result(point) for point in range(6)]
    assert list(t.log_trials(results)) == [4, 6]
    assert len(searches) == 2
    _, found = runs(empty, "trial", "many")
    shown = {run.data.tags["lit_dps.point"]: run.data.tags["lit_dps.status"] for run in found}
    assert shown == {str(point): "complete" for point in range(6)} and len(found) == 6


def test_the_study_run_holds_the_scaling_curve_once(empty, tmp_path):
    t = tracker(empty, "scaling")
    (tmp_path / "table.csv").write_text("a\n")
    for curve in (
        {4: 100.0, 16: 50.0},
        {4: 100.0, 16: 50.0, 64: 40.0},
    ):  # taken up with one more batch size
        t.log_study(
            {"K_star/S_0": curve},
            {"c1/S_0": 9.0},
            {"seed": 0},
            [tmp_path / "table.csv"],
            {"c.yaml": "x"},
            True,
        )
    client, (run,) = runs(empty, "study", "scaling")
    history = client.get_metric_history(run.info.run_id, "K_star/S_0")
    assert [(m.step, m.value) for m in history] == [(4, 100), (16, 50), (64, 40)]
    assert len(client.get_metric_history(run.info.run_id, "c1/S_0")) == 1
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"c.yaml", "table.csv"}
    assert run.info.status == "FINISHED"


def test_the_cell_run_holds_k_star_and_counts(empty):
    t = tracker(empty, "cell")
    t.log_cell(CELL, {"K_star": 48, "complete": 1, "incomplete": 2})
    _, (run,) = runs(empty, "cell", "cell")
    assert run.data.metrics == {"K_star": 48, "complete": 1, "incomplete": 2}


def test_a_value_that_no_longer_holds_becomes_nan(empty):
    def last(kind: str) -> dict:
        return runs(empty, kind, "gone")[1][0].data.metrics

    t = tracker(empty, "gone")
    t.log_cell(CELL, {"K_star": 48, "K_median": 64})
    t.log_cell(CELL, {"K_star": 48})
    assert last("cell")["K_star"] == 48 and math.isnan(last("cell")["K_median"])
    families = ("b_crit/", "b_crit_low/", "K_star/")
    first = ({"K_star/S_0": {4: 100.0, 16: 50.0}}, {"b_crit/S_0": 9.0, "noise_scale": 3.0})
    second = ({"K_star/S_0": {4: 100.0}}, {"b_crit_low/S_0": 5.0})
    histories = []
    for curves, metrics in (first, second, second, first):
        t.log_study(curves, metrics, {}, [], {}, finished=False, families=families)
        client, (run,) = runs(empty, "study", "gone")
        history = client.get_metric_history(run.info.run_id, "K_star/S_0")
        histories.append(sorted((m.timestamp, m.step, m.value) for m in history))
        shown = run.data.metrics
        assert math.isnan(shown.get("b_crit/S_0", math.nan)) is ("b_crit/S_0" not in metrics)
        assert math.isnan(shown.get("b_crit_low/S_0", math.nan)) is (metrics is first[1])
        assert math.isnan(shown["K_star/S_0"]) is (curves is second[0])
        assert shown["noise_scale"] == 3.0, "of no family"
    assert [len(history) for history in histories] == [2, 3, 3, 4]
    assert histories[-1][-1][1:] == (16, 50.0)


def test_a_run_has_more_parameters_than_one_request_takes(empty):
    params = {f"p{i}": i for i in range(250)}
    t = tracker(empty, "params")
    t.log_study({}, {}, params, [], {}, finished=False)
    (run,) = runs(empty, "study", "params")[1]
    assert run.data.params == {name: str(value) for name, value in params.items()}


def test_experiments_and_their_pages(empty, tmp_path):
    tracker(empty, "page").logged()
    (experiment,) = experiments(f"sqlite:///{empty}/mlflow.db")
    expected = f"http://127.0.0.1:5001/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
    assert page_address("sqlite:///x.db", experiment.experiment_id, port=5001) == expected
    with refuses(f"{tmp_path}/none.db", error=StorageError):
        experiments(f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


def test_trials_that_failed_or_were_stopped_say_why(empty):
    t = tracker(empty, "why")
    t.log_trial(
        result(0, Status.FAILED, failure="ValueError: no", traceback="Traceback\nValueError: no\n")
    )
    t.log_trial(result(1, Status.STOPPED, failure="EarlyStopping"))
    client, trials = runs(empty, "trial", "why")
    found = {int(run.data.tags["lit_dps.point"]): run for run in trials}
    said = {
        point: (run.info.status, run.data.tags["lit_dps.failure"]) for point, run in found.items()
    }
    assert said == {0: ("FAILED", "ValueError: no"), 1: ("KILLED", "EarlyStopping")}
    file = client.download_artifacts(found[0].info.run_id, "traceback.txt")
    assert Path(file).read_text() == "Traceback\nValueError: no\n"
    assert client.list_artifacts(found[1].info.run_id) == []
    t.log_trial(result(0))
    assert {run.info.status for run in runs(empty, "trial", "why")[1]} == {"FINISHED", "KILLED"}


def test_what_is_logged_is_not_logged_again(empty, tmp_path):
    numbers = {"c1/S_0": math.inf, "c2/S_0": math.nan, "b_crit/S_0": 2.5, "low/S_0": -math.inf}
    file, seen = tmp_path / "table.txt", []
    for text, seed in (("a", 0), ("a", 0), ("b", 0)):  # of equal size
        file.write_text(text)
        t = tracker(empty, "twice")
        t.log_cell(CELL, {"K_star": 48, **numbers})
        t.log_study(
            {"K_star/S_0": {4: math.inf}},
            numbers,
            {"seed": seed},
            [file],
            {"c.yaml": "x"},
            finished=True,
        )
        client, (study,) = runs(empty, "study", "twice")
        _, (cell,) = runs(empty, "cell", "twice")
        histories = {
            (r.info.run_id, name): client.get_metric_history(r.info.run_id, name)
            for r in (study, cell)
            for name in r.data.metrics
        }
        assert {len(history) for history in histories.values()} == {1}
        shown = {
            item.path: client.download_artifacts(study.info.run_id, item.path)
            for item in client.list_artifacts(study.info.run_id)
        }
        times = {name: Path(path).stat().st_mtime_ns for name, path in shown.items()}
        seen.append(
            (study.info.end_time, cell.info.end_time, times, Path(shown["table.txt"]).read_text())
        )
    assert seen[0] == seen[1]
    assert seen[2][3] == "b" and seen[2][2]["c.yaml"] == seen[0][2]["c.yaml"], (
        "what differs alone is logged"
    )


def test_a_study_that_goes_on_is_running_until_it_ends_again(empty):
    def states() -> list[str]:
        return [runs(empty, kind, "on")[1][0].info.status for kind in ("study", "cell")]

    first = tracker(empty, "on")
    first.log_trial(result(0))
    assert states() == ["RUNNING", "RUNNING"]
    first.log_study({}, {}, {}, [], {}, finished=True)
    opened = MlflowSync(first.uri, str(empty), "workload", "on", {"version.torch": "3"})
    opened.logged()
    assert states() == ["FINISHED", "FINISHED"], "to open it is not to go on"
    assert runs(empty, "study", "on")[1][0].data.tags["version.torch"] == "2"
    opened.show_running()
    assert states() == ["RUNNING", "FINISHED"]
    assert runs(empty, "study", "on")[1][0].data.tags["version.torch"] == "3"
    opened.log_trial(result(1))
    assert states() == ["RUNNING", "RUNNING"]
    opened.log_study({}, {}, {}, [], {}, finished=False)
    assert states() == ["RUNNING", "RUNNING"]
    opened.log_study({}, {}, {}, [], {}, finished=True)
    assert states() == ["FINISHED", "FINISHED"]
