"""Advice from runs that exist: what counts, what is a bound, and what is refused."""

import json
import math

import mlflow
import numpy as np
import pandas as pd
import pytest

import lit_dps
from lit_dps.advice.curve_goal import CurveGoal
from lit_dps.advice.existing_runs import advise_on_runs, observe, step_time_of
from lit_dps.advice.run_table import read_runs
from lit_dps.analysis.observations import AT_LEAST, AT_MOST
from lit_dps.cli import main
from lit_dps.core.errors import ConfigError
from tests.support.errors import error_line, refusals_in, refuses
from tests.support.texts import numbers_in

C1, C2 = 4e4, 200.0
SIZES = [16, 32, 64, 128, 256, 512, 1024]


def law_runs(**columns: object) -> pd.DataFrame:
    """Runs that follow the law exactly, one at each batch size."""
    rows = []
    for b in SIZES:
        rows.append({"batch_size": b, "steps": C1 / b + C2, "step_seconds": 0.01 + 1e-4 * b})
    return pd.DataFrame(rows).assign(**columns)


def observed(rows: list[dict]) -> dict:
    table = read_runs(pd.DataFrame(rows))
    return {o.batch_size: o for o in observe(table.runs).observations}


# ---- What counts ----


def test_the_recommendation_is_the_one_of_calculus():
    # (c1 / B + c2) (a + b B) is least at B = sqrt(c1 a / (c2 b)) = 141.
    advice = lit_dps.advise(law_runs())
    assert advice.best["batch_size"] == 128
    seconds = (C1 / 128 + C2) * (0.01 + 128e-4)
    assert advice.best["hours"] == pytest.approx(seconds / 3600, rel=0.02)
    assert advice.exit_code == 0
    assert advice.law.b_crit_interval.low < C1 / C2 < advice.law.b_crit_interval.high


def test_the_best_rate_counts_and_its_place_is_noted():
    rows = []
    for rate, steps in ((0.01, 400), (0.02, 300), (0.04, 500)):
        rows.append({"batch_size": 8, "learning_rate": rate, "steps": steps})
    rows.append({"batch_size": 16, "learning_rate": 0.02, "steps": 200})
    table = read_runs(pd.DataFrame(rows))
    evidence = observe(table.runs)
    assert [o.k for o in evidence.observations] == [300, 200]
    assert evidence.best_rates == {8: 0.02, 16: 0.02}
    assert evidence.observations[0].boundary == ""
    assert evidence.observations[0].noise > 0 == evidence.observations[1].noise
    assert "0.020 of 3 at B = 8" in evidence.notes[0]
    assert "One learning rate was tried at B = 16" in evidence.notes[1]


def test_a_best_rate_at_an_end_is_a_boundary():
    rows = [
        {"batch_size": 8, "lr": 0.01, "steps": 400},
        {"batch_size": 8, "lr": 0.02, "steps": 300},
    ]
    assert observed(rows)[8].boundary == "learning_rate high"
    # A larger rate that diverged shows that the best one is inside.
    rows.append({"batch_size": 8, "lr": 0.04, "steps": math.nan, "censored": 1})
    rows[0]["censored"] = rows[1]["censored"] = 0
    assert observed(rows)[8].boundary == ""
    assert observed(rows)[8].bound == 0


def test_the_median_over_seeds_of_the_best_rate_counts():
    rows = []
    for rate, runs in ((0.1, (300, 310, 330)), (0.2, (250, 400, 420))):
        for seed, steps in enumerate(runs):
            rows.append({"batch_size": 8, "lr": rate, "seed": seed, "steps": steps})
    observation = observed(rows)[8]
    assert observation.k == 310
    assert observation.noise > 0


def test_runs_that_missed_the_goal_are_bounds():
    rows = [
        {"batch_size": 8, "lr": 0.1, "steps": 500, "censored": 1},
        {"batch_size": 8, "lr": 0.2, "steps": 700, "censored": 1},
        {"batch_size": 16, "lr": 0.1, "steps": 400, "censored": 0},
        # This run was stopped before 400 steps: it might have met the goal first.
        {"batch_size": 16, "lr": 0.2, "steps": 200, "censored": 1},
        {"batch_size": 32, "lr": 0.1, "steps": 300, "censored": 0},
        {"batch_size": 32, "lr": 0.2, "steps": 350, "censored": 1},
        {"batch_size": 64, "lr": 0.2, "steps": None, "censored": 1},
    ]
    found = observed(rows)
    assert (found[8].bound, found[8].k) == (AT_LEAST, 500)
    assert (found[16].bound, found[16].k) == (AT_MOST, 400)
    assert (found[32].bound, found[32].k) == (0, 300)
    assert 64 not in found


def test_an_even_number_of_seeds_has_the_mean_of_the_middle_two():
    """Both rates met the goal with all seeds, so K is no bound."""
    rows = []
    for rate, runs in ((0.1, (300, 400)), (0.2, (340, 390))):
        for seed, steps in enumerate(runs):
            rows.append({"batch_size": 8, "lr": rate, "seed": seed, "steps": steps})
    observation = observed(rows)[8]
    assert (observation.bound, observation.k) == (0, 350)


@pytest.mark.parametrize(("last", "bound"), [(200, 150), (math.nan, 100)])
def test_a_rate_of_which_half_the_seeds_met_the_goal_is_a_bound(last, bound):
    rows = [
        {"batch_size": 8, "lr": 0.1, "seed": 0, "steps": 100, "censored": 0},
        {"batch_size": 8, "lr": 0.1, "seed": 1, "steps": last, "censored": 1},
    ]
    evidence = observe(read_runs(pd.DataFrame(rows)).runs)
    (observation,) = evidence.observations
    assert (observation.bound, observation.k) == (AT_LEAST, bound)
    assert not any("no run met" in note or "diverged" in note for note in evidence.notes)


def test_only_a_rate_that_met_the_goal_is_the_best_one():
    rows = [
        {"batch_size": 8, "lr": 0.1, "steps": 500, "censored": 1},
        {"batch_size": 8, "lr": 0.2, "steps": None, "censored": 1},
        {"batch_size": 16, "lr": 0.1, "steps": 400, "censored": 0},
        {"batch_size": 16, "lr": 0.2, "steps": 500, "censored": 0},
    ]
    assert observe(read_runs(pd.DataFrame(rows)).runs).best_rates == {16: 0.1}
    evidence = observe(read_runs(pd.DataFrame(rows[:2])).runs)
    assert evidence.best_rates == {} and len(evidence.notes) == 1
    assert "lower bound" in evidence.notes[0]


def test_a_goal_met_at_the_first_validation_is_an_upper_bound():
    rows = []
    for b, curve in ((8, (0.9, 0.2)), (16, (0.3, 0.2))):
        for i, value in enumerate(curve, 1):
            rows.append({"batch_size": b, "step": 50 * i, "val_loss": value})
    evidence = observe(read_runs(pd.DataFrame(rows), goal=CurveGoal("val_loss", 0.3)).runs)
    bounds = [(o.k, o.resolution, o.bound) for o in evidence.observations]
    assert bounds == [(100, 50, 0), (50, 0, AT_MOST)]
    assert any("At B = 16 the first validation" in note for note in evidence.notes)


def test_a_chosen_column_replaces_one_of_our_name():
    table = law_runs(global_batch=[8 * b for b in SIZES])
    runs = read_runs(table, names={"batch_size": "global_batch"}).runs
    assert list(runs["batch_size"]) == [8 * b for b in SIZES]
    curves = pd.DataFrame({"run": [1, 1], "batch_size": [8, 8], "steps": [10, 20], "loss": [1, 0]})
    runs = read_runs(curves, names={"step": "steps"}, goal=CurveGoal("loss", 0.5)).runs
    assert list(runs["steps"]) == [20]


# ---- The best rate ----


def test_a_best_rate_at_an_end_has_a_note_in_text_and_json():
    """With and without times, and with a law by a prior."""
    for count in (2, 7):
        for columns in ([], ["step_seconds"]):
            runs = law_runs(lr=0.1).iloc[:count].drop(columns=columns)
            slower = runs.assign(lr=0.2, steps=2 * runs["steps"])
            advice = lit_dps.advise(pd.concat([runs, slower]))
            document = advice.to_dict()
            noted = [*document["notes"], *document["assumed"]]
            assert sum("learning_rate low" in note for note in noted) == 1
            assert "".join(advice.text.split()).count("learning_ratelow") == 1


def test_the_law_of_rates_omits_bounds_and_best_rates_at_an_end():
    rows = []
    for b, best in ((16, 0.02), (64, 0.04), (256, 0.08), (1024, 0.4)):
        for rate in (0.01, 0.02, 0.04, 0.08, 0.16, 0.4):
            steps = (C1 / b + C2) * (1 + abs(math.log(rate / best)))
            rows.append({"batch_size": b, "lr": rate, "steps": steps, "step_seconds": 0.01 + b})
    advice = lit_dps.advise(pd.DataFrame(rows))
    law = advice.answer.rate
    # The best rate of B = 1024 is at an end.
    assert law.range == (16, 256)
    assert law.exponent == pytest.approx(0.5)
    # Six rates are tried between 0.01 and 0.4.
    assert law.scatter == pytest.approx(math.log(40) / 5)
    assert advice.to_dict()["assumed"][-1] == law.describe()


def test_a_rate_that_is_best_everywhere_has_an_error():
    rows = []
    for b in SIZES[:3]:
        for rate, factor in ((0.05, 2), (0.1, 1), (0.2, 2)):
            steps = factor * (C1 / b + C2)
            rows.append({"batch_size": b, "lr": rate, "steps": steps, "step_seconds": 0.01 + b})
    law = lit_dps.advise(pd.DataFrame(rows)).answer.rate
    assert law.exponent == pytest.approx(0, abs=1e-9) and law.error > 0.1


def test_stopped_seeds_of_the_best_rate_have_a_note():
    rows = []
    for seed, (steps, censored) in enumerate(((300, 0), (310, 0), (100, 1))):
        rows.append(
            {"batch_size": 8, "lr": 0.1, "seed": seed, "steps": steps, "censored": censored}
        )
    evidence = observe(read_runs(pd.DataFrame(rows)).runs)
    assert (evidence.observations[0].bound, evidence.observations[0].k) == (AT_MOST, 310)
    assert any("were stopped before step 310" in note for note in evidence.notes)


# ---- Step times ----


def test_timed_runs_without_devices_have_a_note():
    runs = law_runs(devices=[8, None, 8, 8, 8, 8, None])
    assert any("(2)" in note for note in lit_dps.advise(runs).notes if "1 device" in note)
    assert not any("count as" in note for note in lit_dps.advise(law_runs(devices=8)).notes)


def test_times_that_include_validation_are_not_assumed_to_exclude_it():
    table = read_runs(law_runs())
    excluded, included = (
        advise_on_runs(table._replace(times_include_checks=include)).answer.assumed
        for include in (False, True)
    )
    assert any("exclude validation" in line for line in excluded)
    assert not any("validation" in line for line in included)


def test_runs_on_eight_devices_alone_answer_for_eight():
    advice = lit_dps.advise(law_runs(devices=8))
    assert set(advice.table["devices"]) == {8}
    row = advice.table.set_index("batch_size").loc[128]
    assert row["step_seconds"] == pytest.approx(0.01 + 128e-4, rel=1e-3)
    assert row["device_hours"] == pytest.approx(8 * row["hours"])
    assert advice.table["batch_size"].min() == 8


def test_step_times_of_several_groups_of_devices_are_named():
    runs = law_runs(devices=8)
    runs.loc[runs["batch_size"] <= 32, "devices"] = 4
    counts = runs.groupby("devices")["batch_size"].nunique()
    assert counts[4] >= 2 and counts[8] > counts[4]
    advice = lit_dps.advise(runs, devices=[4, 8])
    assert set(advice.table["devices"]) == {8}
    (ignored,) = [note for note in advice.notes if "are not used" in note]
    assert numbers_in(ignored)[:2] == [8, 4]
    assert any(note.startswith("There are no step times of 4 devices") for note in advice.notes)


def test_without_times_there_are_steps_and_a_next_run():
    advice = lit_dps.advise(law_runs().drop(columns="step_seconds"))
    assert advice.answer is None and advice.best is None
    steps = advice.table.set_index("batch_size").loc[128]
    assert steps["steps"] == pytest.approx(C1 / 128 + C2, rel=0.02)
    assert advice.next_run.batch_size in advice.table["batch_size"].to_list()
    assert any("no run has step_seconds" in note for note in advice.notes)
    notes: list[str] = []
    one = read_runs(law_runs().iloc[:1])
    assert step_time_of(one.runs, notes) is None and "at two batch sizes" in notes[0]


def test_one_or_two_batch_sizes_are_answered_by_a_prior_and_none_is_not():
    for count in (1, 2):
        runs = law_runs().iloc[:count]
        advice = lit_dps.advise(runs, batch_sizes=[64, 256])
        assert set(advice.steps["known"]) == {"prior"}
        for row in advice.steps.to_dict("records"):
            assert row["low"] < C1 / row["batch_size"] + C2 < row["high"]
        assert advice.next_run.batch_size > 16
        assert (advice.best is None) == (count == 1), "one batch size has no model of times"
        assert advice.to_dict()["laws"][0]["refused"] == "critical"
    advice = lit_dps.advise(law_runs(censored=1).iloc[:2])
    assert advice.exit_code == 3 and advice.best is None and advice.next_run is None
    assert [row["bound"] for row in advice.to_dict()["measured"]] == ["at least"] * 2


def test_a_text_without_a_recommendation_has_the_verdict_on_the_law_once():
    """K rises with B, and no law extrapolates to B = 4096."""
    runs = pd.DataFrame({"batch_size": [8, 16, 32], "steps": [300, 400, 250]})
    advice = lit_dps.advise(runs.assign(step_seconds=0.01), batch_sizes=[4096])
    assert advice.best is None and advice.law is not None
    reason = " ".join(advice.law.verdict.reason.split())
    assert " ".join(advice.text.split()).count(reason) == 1


# ---- The document for machines ----


def test_the_document_has_the_numbers_of_the_table():
    advice = lit_dps.advise(law_runs(), price=2.0)
    document = json.loads(advice.to_json())
    assert document["status"] == "answered" and document["source"] == "runs"
    best = document["recommendation"]
    assert best["batch_size"] == 128 and best["devices"] == 1
    assert best["steps"]["low"] < best["steps"]["value"] < best["steps"]["high"]
    assert best["cost"]["value"] == pytest.approx(2 * best["hours"]["value"])
    assert len(document["cells"]) == len(advice.table)
    assert [row["batch_size"] for row in document["measured"]] == SIZES
    assert document["laws"][0]["critical_batch_size"]["value"] == pytest.approx(C1 / C2, rel=0.05)
    # A single run has no known noise.
    assert {row["log_error"] for row in document["measured"]} == {None}
    assert document["near_best"]["devices"] == 1
    untimed = lit_dps.advise(law_runs().drop(columns="step_seconds")).to_dict()
    for row in untimed["cells"]:
        assert row["examples"] == row["steps"]["value"] * row["batch_size"]
    # Unknown numbers are null, not NaN.
    assert json.loads(lit_dps.advise(law_runs()).to_json())["recommendation"]["cost"] == {
        "value": None,
        "low": None,
        "high": None,
    }


def test_the_command_prints_json_alone_on_stdout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    law_runs().rename(columns={"batch_size": "bs"}).to_csv("runs.csv", index=False)
    assert main(["advise", "--runs", "runs.csv", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["recommendation"]["batch_size"] == 128
    assert "batch_size is read from the column bs" in captured.err
    assert main(["advise", "--runs", "runs.csv", "--devices", "1", "--price", "3"]) == 0
    assert "Train with B = 128 on 1 device" in capsys.readouterr().out
    law_runs(censored=1).to_csv("none.csv", index=False)
    assert main(["advise", "--runs", "none.csv"]) == 3
    assert list(map(str, tmp_path.glob("mlruns*"))) == []


# ---- Refusals ----


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"batch_size": [16, 0]}, "batch_size in line 3 of runs", 0),
        ({"steps": ["many", 3]}, "steps in line 2 of runs", "many"),
        ({"steps": [300, math.nan]}, "steps in line 3 of runs", None),
        ({"censored": [0, 2]}, "censored in line 3 of runs", 2),
        ({"learning_rate": [-1, 1]}, "learning_rate in line 2 of runs", -1),
        ({"batch_size": [16, math.nan]}, "batch_size in line 3 of runs", None),
    ],
)
def test_wrong_values_are_refused_with_their_line(change, key, value):
    table = pd.DataFrame({"batch_size": [16, 32], "steps": [300, 200], **change})
    with refuses(key, value):
        read_runs(table)


def test_missing_columns_and_repeated_runs_are_refused():
    with refuses("batch_size of runs", None):
        read_runs(pd.DataFrame({"steps": [1]}))
    with refuses("steps of runs", None):
        read_runs(pd.DataFrame({"batch_size": [1]}))
    with refuses("learning_rate of runs", "a.lr, b.lr"):
        read_runs(pd.DataFrame({"batch_size": [1], "steps": [1], "a.lr": [1], "b.lr": [1]}))
    twice = pd.DataFrame({"batch_size": [8, 8], "steps": [3, 4], "seed": [1, 1]})
    with refuses("runs"):
        read_runs(twice)
    assert len(read_runs(twice.assign(run=["a", "b"])).runs) == 2
    curve = pd.DataFrame({"run": ["a", "a"], "batch_size": [8, 8], "steps": [100, 200]})
    assert len(read_runs(curve.assign(seed=[1, 2])).runs) == 2
    with refuses("runs"):
        read_runs(curve.assign(batch_size=[8, 8]).assign(run="a"))
    infinite = pd.DataFrame({"batch_size": [8], "step": [1], "val_loss": [math.inf]})
    with refuses("val_loss of runs"):
        read_runs(infinite, goal=CurveGoal("val_loss", 0.7))
    curves = pd.DataFrame({"batch_size": [8, 8], "step": [1, 1], "val_loss": [1.0, 0.5]})
    with refuses("step in line 3 of runs"):
        read_runs(curves, goal=CurveGoal("val_loss", 0.7))
    with refuses("goal.at_most", 0.1):
        read_runs(curves.iloc[:1], goal=CurveGoal("val_loss", 0.1))
    with refuses("goal", "val_loss = 3"):
        lit_dps.advise(curves, goal="val_loss = 3")
    with refuses("goal.at_most", 0.9):
        lit_dps.advise(curves, goal="val_acc <= 0.9")


@pytest.mark.parametrize(
    "options",
    [
        ["--budget", "3m"],
        ["--columns", "bs"],
        ["--columns", "batch_size=batch_size,batch_size=steps"],
        ["--filter", "params.lr = 0"],
        ["--columns", "batch_size=none"],
        ["--devices", "a"],
        ["--price", "-1"],
        ["--foo", "1"],
    ],
)
def test_bad_options_are_refused_in_one_line(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    law_runs().to_csv("runs.csv", index=False)
    assert main(["advise", "--runs", "runs.csv", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("lit-dps: error: --")


@pytest.mark.parametrize("content", [b"", b"batch_size,steps\n", bytes(range(128, 256)), b"a\n1\n"])
def test_files_that_are_no_table_are_refused_in_one_line(content, tmp_path, capsys):
    file = tmp_path / "runs.csv"
    file.write_bytes(content)
    assert main(["advise", "--runs", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lit-dps: error: ") and error.count("\n") == 1
    assert main(["advise", str(file)]) == 2
    assert f"lit-dps advise --runs {file}" in error_line(capsys.readouterr().err)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_recognized(separator, tmp_path, capsys):
    file = tmp_path / "runs.csv"
    law_runs().to_csv(file, index=False, sep=separator)
    assert main(["advise", "--runs", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]["batch_size"] == 128


# ---- MLflow ----


def test_the_runs_of_an_mlflow_experiment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/their.db"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("theirs", artifact_location=str(tmp_path))
    for b in SIZES:
        run = client.create_run(experiment)
        client.log_param(run.info.run_id, "data/batch_size", b)
        client.log_param(run.info.run_id, "lr", 0.1)
        client.log_param(run.info.run_id, "trainer/steps", 7 * b)
        k = C1 / b + C2
        for step in np.arange(0, 2 * k, k / 20).astype(int):
            loss = 2.0 * 0.25 ** (step / k)
            seconds = step * (0.01 + 1e-4 * b)
            client.log_metric(run.info.run_id, "val_loss", loss, int(1000 * seconds), int(step))
        client.set_terminated(run.info.run_id)
    client.set_terminated(client.create_run(experiment).info.run_id, "FAILED")
    diverged = client.create_run(experiment).info.run_id
    client.log_param(diverged, "data/batch_size", 128)
    client.log_param(diverged, "lr", 0.5)
    client.log_param(diverged, "trainer/steps", 7 * 128)
    for step, loss in ((0, 2.0), (1000, math.nan)):
        client.log_metric(diverged, "val_loss", loss, int(22.8 * step), step)
    words = ["advise", "--runs", "mlflow:theirs", "--storage.mlflow", uri, "--json"]
    assert main(words) == 2
    assert refusals_in(capsys.readouterr().err) == [("goal.at_most", "null")]
    assert main([*words, "--goal.at_most", "0.5"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    for row in document["measured"]:
        assert row["steps"] == pytest.approx(C1 / row["batch_size"] + C2, rel=0.06)
        assert row["learning_rate"] == 0.1 and row["bound"] == "exact"
    assert document["recommendation"]["batch_size"] == 128
    assert document["recommendation"]["step_seconds"] == pytest.approx(0.0228, rel=0.05)
    assert "1 failed runs are left out" in captured.err
    assert "the timestamps of val_loss" in captured.err
    chosen = ["--columns", "steps=trainer/steps", "--goal.at_most", "0.5"]
    main([*words, *chosen])
    document = json.loads(capsys.readouterr().out)
    assert [row["steps"] for row in document["measured"]] == [7 * b for b in SIZES]
    assert main(["advise", "--runs", "mlflow:their", "--storage.mlflow", uri]) == 2
    assert "mlflow:theirs?" in error_line(capsys.readouterr().err)


def test_a_filter_selects_the_mlflow_runs_of_one_sparsity(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/their.db"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("theirs", artifact_location=str(tmp_path))
    for sparsity, factor in (("0", 1), ("0.90", 3)):
        for b in (16, 32, 64):
            run = client.create_run(experiment).info.run_id
            client.log_param(run, "batch_size", b)
            client.log_param(run, "pruning.sparsity", sparsity)
            for i, loss in enumerate((0.9, 0.8, 0.1), 1):
                client.log_metric(run, "val_loss", loss, 1000 * i, factor * i * 6400 // b)
            client.set_terminated(run)
    words = ["advise", "--runs", "mlflow:theirs", "--storage.mlflow", uri, "--json"]
    words += ["--goal.at_most", "0.5"]
    assert main(words) == 2
    # The order of runs in MLflow decides which sparsity is the example.
    (hint,) = {"0", "0.90"} & {*error_line(capsys.readouterr().err).split('"')}
    for sparsity, factor in (("0", 1), ("0.90", 3)):
        assert main([*words, "--filter", f'params."pruning.sparsity" = "{sparsity}"']) == 0
        document = json.loads(capsys.readouterr().out)
        steps = [factor * 3 * 6400 // b for b in (16, 32, 64)]
        assert [row["steps"] for row in document["measured"]] == steps
    for terms in ('params."pruning.sparsity" = "0.5"', "sparsity is 0.9"):
        assert main([*words, "--filter", terms]) == 2
        assert refusals_in(capsys.readouterr().err) == [("--filter", repr(terms))]


def test_prices_below_zero_are_refused_in_python_too():
    with pytest.raises(ConfigError):
        lit_dps.advise(law_runs(), price=-1)
