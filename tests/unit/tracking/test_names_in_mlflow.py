"""What people see of a study in Optuna and MLflow: names, states, curves, a description, views of
the page of runs."""

from __future__ import annotations

import json
import math

import optuna
import pytest

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.record import grid
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Series, Status, Trial, TrialResult
from lit_dps.storage import schema
from lit_dps.storage.cells import REPORTED_VALUES
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import declare
from lit_dps.storage.run_records import store_environment, store_k_star_trials
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import cell_study_name
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.tracking.description import (
    LAST_LINE,
    constants,
    lines_within,
    markdown,
    scaling,
    study_metrics,
)
from lit_dps.tracking.pages import CELLS, CURVES, page_address, view_key, views_of
from lit_dps.tracking.sync import MlflowSync
from tests.support.fake_study import analysis_of, law_results, result
from tests.support.runs import trials_of

SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
CELL = Cell(4, 0.5)


def curve(checks: int) -> dict[str, list[float]]:
    steps = [16 * (i + 1) for i in range(checks)]
    return {"step": steps, "val_error": [1 / s for s in steps], "train_loss": [1.0] * checks}


@pytest.fixture
def stored(tmp_path):
    """An Optuna study of a cell with a complete, an outraced and a diverged trial."""
    url = f"sqlite:///{tmp_path}/study.db"
    config = StudyConfig(name="s", batch_sizes=[4], sparsities=[0.5], trials=3, space=SPACE)
    _, uid = declare(url, config, "digits", Goal(0.1, 16, 9600), {}, {})
    worker = TrialQueue(
        url,
        "s",
        [CELL],
        3,
        SobolSampler(SPACE, 0),
        0,
        AttemptRules(Goal(0.1)),
        race_factor=2.0,
        uid=uid,
    )
    ends = (Status.COMPLETE, 1600), (Status.OUTRACED, None), (Status.INFEASIBLE, None)
    for (status, steps), trial in zip(
        ends, trials_of(worker), strict=False
    ):  # else one more is asked for
        found = curve(100 if steps else 3)
        if status is Status.INFEASIBLE:
            found["val_error"][-1] = math.nan
        worker.store_result(TrialResult(trial, status, steps, found))
    return url, optuna.load_study(study_name=cell_study_name("s", CELL), storage=open_storage(url))


def test_optuna_shows_the_metric_the_status_and_the_curves(stored):
    _, study = stored
    assert study.metric_names == ["K [steps]"]
    complete, outraced, diverged = study.trials
    assert [t.user_attrs["status"] for t in study.trials] == ["complete", "outraced", "infeasible"]
    assert len(complete.intermediate_values) == REPORTED_VALUES
    assert (
        complete.intermediate_values[16] == 1 / 16
        and complete.intermediate_values[1600] == 1 / 1600
    )
    assert outraced.intermediate_values == {16: 1 / 16, 32: 1 / 32, 48: 1 / 48}
    assert diverged.intermediate_values == {16: 1 / 16, 32: 1 / 32}, (
        "what is not finite is left out"
    )
    optuna.visualization.plot_intermediate_values(study)


def test_an_error_never_becomes_the_value_of_a_trial_that_was_pruned(stored):
    _, study = stored
    complete, outraced, _ = study.trials
    assert (complete.value, outraced.value, study.best_value) == (1600, None, 1600)
    assert (
        outraced.state is optuna.trial.TrialState.PRUNED and outraced.datetime_complete is not None
    )


def test_the_page_of_the_schema_names_what_is_stored_for_people(stored):
    _, study = stored
    assert all(trial.user_attrs.keys() <= schema.TRIAL_ATTRS.keys() for trial in study.trials)


def test_environments_are_kept_once_each(stored):
    url, _ = stored
    for version in ("2.15", "2.15", "2.16", "2.15"):
        store_environment(url, "s", {"key": version, "version.torch": version})
    assert study_attributes(open_storage(url), "s")["environments"] == [
        {"key": v, "version.torch": v} for v in ("2.15", "2.16")
    ]


@pytest.fixture(scope="module")
def study():
    cells = {cell: law_results(cell, 6, 4e4, 60) for cell in grid((4, 16, 64), (0.0, 0.9))}
    model = {
        "class_path": "a.Net",
        "init_args": {"width": 8, "deep": {"class_path": "a.MLP"}, "none": None},
    }
    config = {
        "model": model,
        "trainer": {"accelerator": "cpu", "callbacks": None},
        "pruning": {"exclude": []},
    }
    return analysis_of(cells, "a study", trials=6, config=config)


def test_the_description_says_the_answer_in_markdown(study, golden):
    text = markdown(study, "#/report")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + sum(cell.k_star is not None for cell in study.cells)
    golden.check("tracking/description.md", text)
    assert "K*" not in text, "Markdown would take it for emphasis"


def test_a_description_that_is_too_long_keeps_its_warnings(study):
    whole = markdown(study, "#/report")
    assert markdown(study, "#/report", len(whole)) == whole
    without_details = markdown(study, "#/report", len(whole) - 1)
    without_table = markdown(study, "#/report", len(without_details) - 1)
    assert len(without_table) < len(without_details) < len(whole)
    rows = [line for line in whole.splitlines() if line.startswith("| ")]
    assert [line for line in without_details.splitlines() if line.startswith("| ")] == rows
    assert "| " not in without_table and f"{len(study.answers)} rows" in without_table
    warnings = [line for line in whole.splitlines() if "**warning**" in line]
    for text in (without_details, without_table):
        assert warnings
        assert [line for line in text.splitlines() if "**warning**" in line] == warnings


def test_lines_beyond_the_limit_of_mlflow_are_said_to_be_missing():
    text = "\n".join(f"line {i}" for i in range(100))
    cut = lines_within(text, 200)
    *lines, empty, last = cut.splitlines()
    assert len(cut) <= 200 and lines == text.splitlines()[: len(lines)] and len(lines) > 10
    assert (empty, last) == ("", LAST_LINE)
    assert lines_within(text, len(text)) == text


def test_constants_are_named_by_their_keys():
    assert constants(
        {"model": {"class_path": "a.Net", "init_args": {"width": 8, "none": None}}, "pruning": {}}
    ) == {
        "model": "a.Net",
        "model.width": "8",
    }


def test_what_a_cell_or_a_trial_sets_is_no_constant():
    data = {
        "class_path": "a.Data",
        "init_args": {"batch_size": 128, "size": 9, "net": {"class_path": "b.C"}},
    }
    study = {"grid": {"data.net": ["b.C", "b.D"]}, "space": {"data.size": {"low": 1, "high": 9}}}
    config = {
        "data": data,
        "pruning": {"sparsity": 0.5, "seed": 1, "method": "snip"},
        "study": study,
    }
    assert constants(config) == {"data": "a.Data", "pruning.method": "snip"}


def of_steps(steps: dict[int, int]):
    """The analysis of a study with three equal trials at each batch size, checked every 16 steps."""
    rate = {"model.learning_rate": 0.1, "model.momentum": 0.9}
    cells = {}
    for batch_size, k in steps.items():
        cell = Cell(batch_size, 0.0)
        cells[cell] = [result(cell, point, k, params=rate) for point in range(3)]
    return analysis_of(cells, trials=3)


def test_the_curve_of_k_star_has_no_upper_bounds():
    # B = 256 meets the goal at the first check.
    study = of_steps({4: 1600, 16: 480, 64: 192, 256: 16})
    assert scaling(study) == {"K_star/S_0": {4: 1600, 16: 480, 64: 192}}


def test_constants_of_a_law_that_does_not_describe_k_are_not_logged():
    rising = of_steps({4: 640, 16: 160, 64: 480, 256: 960})
    assert rising.laws[Series(0.0)].fit is not None
    assert study_metrics(rising) == {}
    falling = of_steps({4: 1600, 16: 480, 64: 192, 256: 128})
    assert study_metrics(falling)["c1/S_0"] == pytest.approx(6000, rel=0.1)


def test_mlflow_holds_description_constants_and_views(study, tmp_path):
    tracker = MlflowSync(
        f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "workload", "a study", {}
    )
    tracker.sync(study.record, study)
    client = tracker.runs.client
    run = client.get_run(tracker.runs.run_id)
    assert run.data.tags["mlflow.note.content"] == markdown(study)
    assert (
        run.data.params["model"],
        run.data.params["model.deep"],
        run.data.params["trainer.accelerator"],
    ) == (
        "a.Net",
        "a.MLP",
        "cpu",
    )
    tags = client.get_experiment(tracker.experiment_id).tags
    chart = json.loads(tags[f"mlflow.sharedViewState.{view_key('a study', CURVES)}"])[
        "compareRunCharts"
    ][0]
    assert (
        chart["selectedMetricKeys"] == ["K_star/S_0", "K_star/S_0.9"]
        and chart["xAxisScaleType"] == "log"
    )
    cells = json.loads(tags[f"mlflow.sharedViewState.{view_key('a study', CELLS)}"])
    found = client.search_runs([tracker.experiment_id], cells["searchFilter"])
    assert len(found) == 6 and "metrics.`K_star`" in cells["selectedColumns"]
    first = client.search_runs([tracker.experiment_id], "tags.`lit_dps.kind` = 'trial'")[0]
    assert first.info.run_name.startswith(f"sample {first.data.params['point']} | B=")

    ended = {
        each.info.run_id: each.info.end_time for each in client.search_runs([tracker.experiment_id])
    }
    again = MlflowSync(f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path), "workload", "a study", {})
    again.sync(study.record, study)
    assert ended == {
        each.info.run_id: each.info.end_time for each in client.search_runs([tracker.experiment_id])
    }


def test_an_address_opens_a_view():
    assert page_address("http://host:5000/", "3", view="lit_dps-x-curves") == (
        "http://host:5000/#/experiments/3/runs?workflowType=machine_learning"
        "&viewStateShareKey=lit_dps-x-curves&compareRunsMode=CHART"
    )


def test_views_ask_for_the_study_alone():
    views = views_of("it is", ["batch_size"], ["model.lr"], "val_error", ["K_star/S_0"])
    name = "it is"
    assert all(
        f"tags.`lit_dps.study` = {name!r}" in view["searchFilter"] for view in views.values()
    )
    assert views["trials"]["selectedColumns"][2] == "metrics.`val_error`"


def test_the_study_of_the_name_alone_shows_the_k_star_of_each_cell(stored):
    url, cell = stored
    best = Trial(CELL, 0, {"model.learning_rate": 0.1})
    other = Trial(Cell(8, 0.5, (("data.kind", "./a"), ("model.delay", 2))), 1, {})
    for k_star in (1600, 1600, 1200):  # as it was, and a better one
        store_k_star_trials(url, "s", [(best, k_star), (other, 900)])
    study = optuna.load_study(study_name="s", storage=open_storage(url))
    shown = [(t.value, t.params, t.user_attrs["cell"]) for t in study.trials]
    here = {"batch_size": 4, "sparsity": 0.5}
    assert (
        shown[0] == (1600, here, "B=4 S=0.5")
        and shown[2] == (1200, here, "B=4 S=0.5")
        and len(shown) == 3
    )
    assert shown[1][1] == {"batch_size": 8, "sparsity": 0.5, "model.delay": 2}
    # A stored name has what follows the last dot of a text, as in earlier versions.
    assert shown[1][2] == "B=8 S=0.5 kind=/a delay=2"
    assert study.metric_names == ["K*"]
    assert all(trial.user_attrs.keys() == schema.OUTCOME_ATTRS.keys() for trial in study.trials)
    optuna.visualization.plot_slice(study, params=["batch_size"])
    assert len(cell.trials) == 3, "the trials of the cell are where they were"
