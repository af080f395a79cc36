"""How tables of runs are read: which runs may be pooled, which diverged, and what is refused."""

import json
import math

import mlflow
import numpy as np
import pandas as pd
import pytest

import lit_dps
from lit_dps.advice.curve_goal import CurveGoal
from lit_dps.advice.existing_runs import observe
from lit_dps.advice.run_table import read_runs
from lit_dps.cli import main
from lit_dps.cli.advise_runs import tracking_uri
from lit_dps.cli.command_line import CommandLine
from lit_dps.core.goal import Goal
from tests.support.errors import error_line, refusals_in, refuses

LOSS = CurveGoal("val_loss", 0.3)


def curve(run, batch_size: int, values, **columns) -> list[dict]:
    """Rows of a run that validates every 10 steps."""
    rows = []
    for i, value in enumerate(values, 1):
        rows.append({"run": run, "batch_size": batch_size, "step": 10 * i, "val_loss": value})
    return [row | columns for row in rows]


# ---- Columns that are not read ----


@pytest.mark.parametrize("name", ["sparsity", "pruning.sparsity"])
@pytest.mark.parametrize("values", [(0, 0.9), (None, 0.9), ("0.0", "0.9")])
def test_runs_of_several_sparsities_are_refused(name, values):
    rows = []
    for sparsity, steps in zip(values, (100, 400), strict=True):
        rows.append({"batch_size": 32, "steps": steps, name: sparsity})
    with refuses(f"{name} of runs"):
        read_runs(pd.DataFrame(rows))
    (k,) = observe(read_runs(pd.DataFrame(rows[1:])).runs).observations
    assert k.k == 400
    curves = curve("a", 8, [0.9, 0.1], **{name: values[0]})
    curves += curve("b", 8, [0.9, 0.5, 0.1], **{name: values[1]})
    with refuses(f"{name} of runs"):
        read_runs(pd.DataFrame(curves), goal=LOSS)


def test_rows_of_two_sparsities_are_no_curve():
    rows = [{"batch_size": 8, "step": 10, "val_loss": 0.9, "sparsity": 0.0}]
    rows.append({"batch_size": 8, "step": 15, "val_loss": 0.2, "sparsity": 0.9})
    with refuses("sparsity of runs", "0, 0.9"):
        read_runs(pd.DataFrame(rows), goal=LOSS)
    # Along a run with a name, pruning is a schedule.
    assert len(read_runs(pd.DataFrame(rows).assign(run="a"), goal=LOSS).runs) == 1


def rows_of_schedule(run, sparsities, **columns) -> list[dict]:
    """Rows of a run of batch size 8 that meets the goal last, with a sparsity at each."""
    values = [0.9] * (len(sparsities) - 1) + [0.1]
    rows = curve(run, 8, values, **columns)
    for row, sparsity in zip(rows, sparsities, strict=True):
        row["sparsity"] = sparsity
    return rows


def test_the_last_sparsity_of_a_run_counts():
    first = rows_of_schedule("a", [0.0, 0.5])
    other = rows_of_schedule("b", [0.0, 0.5, 0.9])
    with refuses("sparsity of runs", "0.5, 0.9"):
        read_runs(pd.DataFrame(first + other), goal=LOSS)
    # The last one in the order of steps, of rows in any order, which some rows lack.
    same = rows_of_schedule("b", [0.9, "0.5", None])[::-1]
    table = read_runs(pd.DataFrame(first + same), goal=LOSS)
    assert list(table.runs["steps"]) == [20, 30] and table.notes == []


def test_one_sparsity_written_in_two_ways_is_no_difference():
    rows = pd.DataFrame({"batch_size": [8, 8], "steps": [10, 20], "sparsity": ["0", "0.0"]})
    assert read_runs(rows).notes == []


def test_other_differences_between_runs_of_one_batch_size_have_a_note():
    table = pd.DataFrame({"batch_size": [8, 8, 16], "steps": [300, 310, 200]})
    noted = read_runs(table.assign(width=[64, 128, 64], optim=["sgd"] * 3)).notes
    assert len(noted) == 1 and "width" in noted[0] and "optim" not in noted[0]
    # Between batch sizes a warm-up in steps usually differs.
    assert read_runs(table.assign(warm_up=[40, 40, 20])).notes == []
    # pandas writes the index of a table as a column without a name.
    assert read_runs(table.assign(**{"Unnamed: 0": [0, 1, 2]})).notes == []
    many = {f"column{i}": [1, 2, 3] for i in range(9)}
    (note,) = read_runs(table.assign(**many)).notes
    assert "column5 and 3 more" in note


def test_what_changes_along_a_run_is_no_setting():
    rows = curve("a", 8, [0.9, 0.1], width=64) + curve("b", 8, [0.9, 0.5, 0.1], width=128)
    table = pd.DataFrame(rows).assign(train_loss=lambda t: 1 / t["step"])
    (note,) = read_runs(table, goal=LOSS).notes
    assert "width" in note and "train_loss" not in note
    # A metric changes along each run that has several validations.
    short = pd.DataFrame(curve("c", 8, [0.1], width=64, train_loss=3.0))
    (note,) = read_runs(pd.concat([table, short]), goal=LOSS).notes
    assert "width" in note and "train_loss" not in note


def test_a_setting_that_changes_along_another_run_has_a_note():
    rows = curve("a", 8, [0.9, 0.1], decay=0.1) + curve("b", 8, [0.9, 0.5, 0.1], decay=0.2)
    changing = curve("c", 8, [0.9, 0.1])
    changing[0]["decay"], changing[1]["decay"] = 0.1, 0.3
    (note,) = read_runs(pd.DataFrame(rows + changing), goal=LOSS).notes
    assert "decay" in note
    # One value in one run differs from several values in another one.
    assert read_runs(pd.DataFrame(rows[:2] + changing), goal=LOSS).notes == [note]


# ---- Goals ----


def test_curves_and_studies_have_one_definition_of_a_met_goal():
    mistakes = 0.14000000060  # 840 of 6000, as float32
    assert Goal(0.14).is_reached(mistakes)
    table = pd.DataFrame(curve("a", 8, [0.5, mistakes]))
    runs = read_runs(table, goal=CurveGoal("val_loss", 0.14)).runs
    assert list(runs["steps"]) == [20] and not runs["censored"].any()
    table = pd.DataFrame(curve("a", 8, [0.5, 1 - mistakes]))
    assert list(read_runs(table, goal=CurveGoal("val_loss", 0.86, True)).runs["steps"]) == [20]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--goal.at_most", "0.3", "--goal.rule", "stays_below"], ("goal.rule", "'stays_below'")),
        (["--goal.at_most", "0.3", "--goal.unit", "examples"], ("goal.unit", "'examples'")),
        (["--goal.at_most", "0.3", "--study.trials", "9"], ("study.trials", "9")),
        (["--goal.at_most", "0.3", "--trainer.devices", "4"], ("trainer.devices", "4")),
        (["--goal.error", "0.3", "--goal.at_most", "0.2"], None),
        (["--goal.at_least", "0.3", "--goal.at_most", "0.2"], None),
    ],
)
def test_goals_that_curves_cannot_have_are_refused(options, refusal, tmp_path, capsys):
    file = tmp_path / "runs.csv"
    pd.DataFrame(curve("a", 8, [0.5, 0.1])).to_csv(file, index=False)
    assert main(["advise", "--runs", str(file), *options]) == 2
    error = capsys.readouterr().err
    if refusal is None:
        assert error_line(error).startswith("goal is ")
    else:
        assert refusals_in(error) == [refusal]


@pytest.mark.parametrize("column", ["steps", "steps_to_goal"])
def test_a_goal_beside_steps_is_not_in_the_answer(column, tmp_path, capsys):
    file = tmp_path / "runs.csv"
    rows = pd.DataFrame({"batch_size": [8, 16, 32], column: [400, 250, 170]})
    rows.to_csv(file, index=False)
    main(["advise", "--runs", str(file), "--goal.at_most", "0.3", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["goal"] is None
    assert any("goal is ignored" in note for note in document["notes"])
    assert lit_dps.advise(rows, goal="val_loss <= 0.3").goal is None
    curves = pd.DataFrame(curve("a", 8, [0.5, 0.1]) + curve("b", 16, [0.1]))
    assert lit_dps.advise(curves, goal="val_loss<=0.3").goal == "val_loss <= 0.3"


def test_the_metric_of_the_goal_is_the_one_that_a_study_monitors(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    rows = curve("a", 8, [0.5, 0.1], err=3) + curve("b", 16, [0.5, 0.1], err=2)
    pd.DataFrame(rows).to_csv(file, index=False)
    words = ["advise", "--runs", str(file), "--json", "--goal.monitor", "err"]
    for way in ("at_most", "error"):
        main([*words, f"--goal.{way}", "2", "--goal.max_steps", "10"])
        document = json.loads(capsys.readouterr().out)
        assert document["goal"] == "err <= 2", way
        bounds = {row["batch_size"]: row["bound"] for row in document["measured"]}
        assert bounds == {8: "at least", 16: "at most"}
        (note,) = [note for note in document["notes"] if "goal.max_steps" in note]
        assert "goal.max_examples" not in note
    main([*words, "--goal.at_most", "0.3", "--goal.metric", "val_loss"])
    assert json.loads(capsys.readouterr().out)["goal"] == "val_loss <= 0.3"


@pytest.mark.parametrize(
    ("options", "uri"),
    [
        ([], "http://there"),
        (["--storage.mlflow=null"], "http://there"),
        (["--storage.folder", "m"], "sqlite:///m/mlflow.db"),
        (["--storage.folder", "m", "--storage.mlflow", "http://here"], "http://here"),
    ],
)
def test_keys_of_the_storage_precede_the_environment(options, uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert tracking_uri(CommandLine(["advise", "--runs", "mlflow:x", *options])) == uri


# ---- Loss curves ----


def test_curves_give_the_first_validation_that_meets_the_goal():
    rows = []
    for b, curve in ((8, (0.9, 0.5, 0.2, 0.3)), (16, (0.9, 0.1, 0.1, 0.1)), (32, (0.9, 0.8, 0.7))):
        for i, value in enumerate(curve):
            rows.append({"batch_size": b, "step": 10 * i, "val_loss": value})
            rows.append({"batch_size": b, "step": 10 * i + 5, "val_loss": None})
    runs = read_runs(pd.DataFrame(rows), goal=CurveGoal("val_loss", 0.3)).runs
    assert list(runs["steps"]) == [20, 10, 20]
    assert list(runs["censored"]) == [False, False, True]
    assert list(runs["check"].iloc[:2]) == [10, 10]
    rising = pd.DataFrame(rows).assign(acc=lambda t: 1 - t["val_loss"])
    runs = read_runs(rising, goal=CurveGoal("acc", 0.9, at_least=True)).runs
    assert list(runs["censored"]) == [True, False, True]


def test_a_curve_that_ends_infinite_has_diverged():
    rows = [{"batch_size": 8, "step": 10, "val_loss": 0.1, "lr": 1}]
    for step, value in ((10, 0.9), (20, math.inf)):
        rows.append({"batch_size": 8, "step": step, "val_loss": value, "lr": 2})
    runs = read_runs(pd.DataFrame(rows), goal=CurveGoal("val_loss", 0.3)).runs
    assert math.isnan(runs["steps"].iloc[1]) and runs["censored"].iloc[1]


def test_a_run_has_its_largest_rate_and_its_median_step_time():
    rows = []
    for name, b in (("a", 8), ("b", 16)):
        for step, rate, seconds in (
            (10, 0.1, 0.5),
            (20, 0.3, 0.02),
            (30, 0.2, None),
            (40, 0, 0.03),
        ):
            row = {"run": name, "batch_size": b, "step": step}
            rows.append({**row, "lr": rate, "step_seconds": seconds, "devices": 8})
            rows.append({**row, "val_loss": 1 / step})
    table = read_runs(pd.DataFrame(rows), goal=CurveGoal("val_loss", 0.04))
    assert list(table.runs["learning_rate"]) == [0.3, 0.3]
    assert list(table.runs["step_seconds"]) == [0.03, 0.03]
    assert list(table.runs["devices"]) == [8, 8]
    assert list(table.runs["steps"]) == [30, 30]
    assert any("largest value" in note for note in table.notes)


@pytest.mark.parametrize("column", ["batch_size", "seed", "devices"])
def test_two_runs_of_one_name_are_no_curve(column):
    curve = {"run": "resnet", "batch_size": 8, "seed": 1, "devices": 1}
    first = {**curve, "step": 10, "val_loss": 0.5}
    second = {**curve, column: 2, "step": 15, "val_loss": 0.1}
    with refuses(f"{column} in line 3 of runs", "2"):
        read_runs(pd.DataFrame([first, second]), goal=CurveGoal("val_loss", 0.3))


@pytest.mark.parametrize("rates", [(1, 0.5, 0.25), (0.1, 0.1, 0.01)])
def test_a_rate_that_changes_along_the_steps_names_no_runs(rates):
    rows = []
    for b in (8, 16):
        for step, rate in zip((1, 2, 3), rates, strict=True):
            rows.append({"batch_size": b, "step": step, "lr": rate, "val_loss": 1 / step})
    goal = CurveGoal("val_loss", 0.4)
    with refuses("learning_rate of runs"):
        read_runs(pd.DataFrame(rows), goal=goal)
    other = pd.DataFrame(rows).assign(lr=lambda table: 2 * table["lr"])
    with refuses("learning_rate of runs"):
        read_runs(pd.concat([pd.DataFrame(rows), other]), goal=goal)
    named = pd.DataFrame(rows).assign(run=lambda table: table["batch_size"])
    assert list(read_runs(named, goal=goal).runs["steps"]) == [3, 3]


def test_a_step_that_falls_begins_another_run():
    """Both curves have B = 8 and no step in common: read as one, K would be 15."""
    steps_and_losses = [(10, 0.9), (20, 0.2), (5, 0.9), (15, 0.25)]
    rows = [{"batch_size": 8, "step": step, "val_loss": loss} for step, loss in steps_and_losses]
    with refuses("step in line 4 of runs", "5"):
        read_runs(pd.DataFrame(rows), goal=LOSS)
    named = pd.DataFrame(rows).assign(run=["a", "a", "b", "b"])
    assert list(read_runs(named, goal=LOSS).runs["steps"]) == [20, 15]
    shuffled = named.iloc[[3, 0, 2, 1]]
    assert sorted(read_runs(shuffled, goal=LOSS).runs["steps"]) == [15, 20]


# ---- Runs that diverged ----


def test_a_nan_in_a_file_has_diverged_and_an_empty_field_was_not_logged(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    lines = ["run,batch_size,lr,step,val_loss,train_loss"]
    lines += ["a,8,0.1,10,0.9,", "a,8,0.1,15,,0.5", "a,8,0.1,20,0.2,"]
    lines += ["b,8,0.2,10,0.9,", "b,8,0.2,20,nan,nan"]  # would be stopped at 20, not diverged
    lines += ["c,8,0.4,10,NaN,nan", "d,8,0.8,10,,0.5"]
    lines += ["e,16,0.1,10,0.9,", "e,16,0.1,12,,0.4", "f,16,0.1,10,0.5,"]
    file.write_text("\n".join(lines))
    main(["advise", "--runs", str(file), "--goal.at_most", "0.3", "--json"])
    document = json.loads(capsys.readouterr().out)
    bounds = {row["batch_size"]: (row["steps"], row["bound"]) for row in document["measured"]}
    assert bounds == {8: (20, "exact"), 16: (10, "at least")}
    notes = document["notes"]
    assert any("2 runs are read as diverged" in note for note in notes)
    assert any("1 run is without a value" in note for note in notes)


def test_runs_of_mlflow_without_a_finite_value_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/their.db"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("theirs", artifact_location=str(tmp_path))
    for rate, values in ((0.1, (0.9, 0.5, 0.2)), (0.2, (0.9, math.inf)), (0.4, ())):
        run = client.create_run(experiment).info.run_id
        client.log_param(run, "batch_size", 8)
        client.log_param(run, "lr", rate)
        for i, value in enumerate(values, 1):
            client.log_metric(run, "val_loss", value, 1000 * i, 10 * i)
        client.set_terminated(run)
    words = ["advise", "--runs", "mlflow:theirs", "--storage.mlflow", uri]
    main([*words, "--goal.at_most", "0.3", "--json"])
    document = json.loads(capsys.readouterr().out)
    # The run that diverged at step 20 does not bound the K of 30.
    (row,) = document["measured"]
    assert (row["steps"], row["bound"], row["log_error"]) == (30, "exact", None)
    assert any(
        "without a value of val_loss" in note and "(1)" in note for note in document["notes"]
    )
    assert any("1 run is read as diverged" in note for note in document["notes"])


# ---- Values ----


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"batch_size": [0.25, 0.5]}, "batch_size in line 2 of runs", 0.25),
        ({"devices": [1, 1.5]}, "devices in line 3 of runs", 1.5),
    ],
)
def test_fractions_of_examples_and_devices_are_refused(change, key, value):
    with refuses(key, value):
        read_runs(pd.DataFrame({"batch_size": [16, 32], "steps": [300, 200], **change}))


def test_nullable_columns_are_read():
    table = pd.DataFrame({"batch_size": [16, 32], "steps": [300, None], "censored": [None, 1]})
    table["lr"] = [0.1, None]
    runs = read_runs(table.astype({"censored": "boolean"}).convert_dtypes()).runs
    assert list(runs["censored"]) == [False, True] and math.isnan(runs["steps"].iloc[1])
    rows = pd.DataFrame(curve("a", 8, [0.9, None, 0.1])).convert_dtypes()
    assert list(read_runs(rows, goal=LOSS).runs["steps"]) == [30]


def test_two_columns_of_one_name_are_refused(tmp_path, capsys):
    table = pd.DataFrame([[8, 16, 300]], columns=["batch_size", "batch_size", "steps"])
    with refuses("columns of runs", "twice batch_size"):
        read_runs(table)
    with refuses("columns of runs", ("batch_size", "")):
        read_runs(pd.DataFrame({("batch_size", ""): [8], ("steps", ""): [10]}))
    file = tmp_path / "runs.csv"
    file.write_text("batch_size,steps,steps\n8,16,300\n")
    assert main(["advise", "--runs", str(file)]) == 2
    assert "'twice steps'" in error_line(capsys.readouterr().err)


def test_arrays_choose_what_to_answer_and_wrong_numbers_are_refused():
    table = pd.DataFrame({"batch_size": [8, 16, 32], "steps": [400, 250, 170]})
    table["step_seconds"] = [0.1, 0.11, 0.12]
    advice = lit_dps.advise(table, batch_sizes=np.array([32, 16]), devices=np.array([1]))
    assert list(advice.table["batch_size"]) == [16, 32]
    for sizes in ([16.5], [], [0], [8, 8], "8,16"):
        with refuses("study.batch_sizes"):
            lit_dps.advise(table, batch_sizes=sizes)
    for devices in ([1, 1], [0], [], 2):
        with refuses("--devices"):
            lit_dps.advise(table, devices=devices)


@pytest.mark.parametrize("has_times", [True, False])
def test_runs_without_times_begin_with_the_missing_recommendation(has_times):
    runs = pd.DataFrame({"batch_size": [32, 64, 128], "steps": [1450, 800, 480]})
    if has_times:
        runs["step_seconds"] = 0.01
    advice = lit_dps.advise(runs)
    assert advice.text.splitlines()[2].startswith("No recommendation") is not has_times
    assert (advice.to_dict()["recommendation"] is None) is not has_times
