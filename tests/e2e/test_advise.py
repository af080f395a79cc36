"""lit-dps advise --method law on a user's module whose law is known: the answer, its budget, going
on, refusals, calibration."""

from __future__ import annotations

import json
import math
import re
import time

import mlflow
import pandas as pd
import pytest
import yaml
from mlflow.entities import Run

from lit_dps.advice import run as advising_run
from lit_dps.core.errors import StorageError
from lit_dps.storage.advice_store import list_advice
from lit_dps.storage.read import list_studies
from tests.e2e.advised_user import C1, C2, Scheduled
from tests.e2e.commands import run_here

HERE = "tests.e2e.advised_user"
BUDGETS = (30, 60, 120, 240)
IMPORTS = 20  # seconds of a process's first command, which are none of its budget


def configuration(folder, module: str = "Module", **goal):
    goal = {"error": 0.05, "check_interval": 5, "max_steps": 400, **goal}
    goal = {key: value for key, value in goal.items() if value is not None}
    config = {
        "model": {"class_path": f"{HERE}.{module}"},
        "data": {"class_path": f"{HERE}.Data"},
        "trainer": {"accelerator": "cpu"},
        "goal": goal,
        "study": {"name": module, "workers": 1},
    }
    (folder / f"{module}.yaml").write_text(yaml.safe_dump(config))
    return folder / f"{module}.yaml"


def advise(folder, module: str, *options: object):
    """Run the command, by the method law unless an option names another."""
    if "--method" not in options:
        options = ("--method", "law", *options)
    return run_here(folder, "advise", "--config", configuration(folder, module), *options)


def shown(folder, name: str) -> tuple[mlflow.MlflowClient, Run]:
    """MLflow's run of a study."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    (found,) = client.search_runs(["1"], f"run_name = '{name}'")
    return client, found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("advice")


@pytest.mark.slow
def test_the_answer_is_near_the_truth_within_the_budget_and_fit_takes_it(folder):
    options, before = ("--devices", "1,2", "--bandwidth", 1e9, "--price", 2, "--trials", 3), 0.0
    for budget in BUDGETS:  # a busy machine needs more: the same command goes on
        began = time.monotonic()
        done = advise(folder, "Module", "--budget", f"{budget}s", *options)
        took = time.monotonic() - began
        assert done.returncode in (0, 3), done.stderr
        assert f"asking takes at most {budget} s" in done.stderr or budget >= 120
        if before == 0:  # what it costs is told before anything is run for it
            assert done.stderr.index("asking is at most") < done.stderr.index("timing steps")
        spent = list_advice(f"sqlite:///{folder}/mlruns/study.db")["Module"]["spent"]
        assert spent <= 1.1 * budget and took <= 1.1 * budget - before + IMPORTS
        before = spent
        if "not identifiable" not in done.stdout:
            break
    where = folder / "mlruns" / "figures" / "Module" / "advice"
    table = pd.read_csv(where / "answer.csv")
    assert set(table["devices"]) == {1, 2} and set(
        table.loc[table["devices"] == 2, "step_known"]
    ) == {"predicted"}
    steps = table.drop_duplicates("batch_size").set_index("batch_size")
    truth = 0.95 * (C1 / steps.index + C2)
    assert ((steps["steps_low"] <= 1.15 * truth) & (truth <= steps["steps_high"])).mean() > 0.7
    assert (where / "advice.txt").read_text() in done.stdout and (
        where / "advice.png"
    ).stat().st_size > 1000
    assert list_studies(f"sqlite:///{folder}/mlruns/study.db") == ["Module-advice"]

    assert "beta2 becomes beta2^(B / 32)" in done.stderr
    size, chosen = (
        int(re.search(r"Train with B = (\d+)", done.stdout)[1]),
        (where / "fit.yaml").read_text(),
    )
    if size != 32:  # the optimizer's own values at the recommended batch size
        said = f"B = {size}: beta2 {0.999 ** (size / 32):.6g}, weight decay {0.01 * size / 32:.3g}"
        assert (
            f"note: {said} (from 0.999 and 0.01 at B = 32)" in done.stdout and f"# {said}" in chosen
        )
    assert "AdamScalingCallback" in chosen

    client, run = shown(folder, "Module-advice")
    timed = client.get_metric_history(run.info.run_id, "advice/step_seconds")
    stored = list_advice(f"sqlite:///{folder}/mlruns/study.db")["Module"]["timed"]
    assert {point.step: point.value for point in timed} == {row[0]: row[1] for row in stored}
    assert run.data.metrics["advice/batch_size"] == size and "noise_scale_low" in run.data.metrics
    assert (
        f"Train with B = {size}" in run.data.tags["mlflow.note.content"]
        and run.info.status == "FINISHED"
    )

    fitted = run_here(folder, "fit", "--config", where / "fit.yaml", "--trainer.devices", 1)
    assert fitted.returncode == 0 and "complete after" in fitted.stdout, fitted.stderr
    told = run_here(folder, "calibration")
    assert "of 1 within the 95 % limits" in told.stdout and "steps: real / predicted" in told.stdout


@pytest.mark.slow
def test_the_same_command_goes_on_with_what_is_left_of_the_budget(folder):
    advice = list_advice(f"sqlite:///{folder}/mlruns/study.db")["Module"]
    enough = math.ceil(
        advice["spent"]
    )  # nothing is left of it: the answer comes from what is stored
    again = advise(folder, "Module", "--budget", f"{enough}s", "--trials", 3)
    assert again.returncode in (0, 3) and "of them are spent" in again.stderr
    assert "timing steps" not in again.stderr and "noise scale" not in again.stderr
    later = list_advice(f"sqlite:///{folder}/mlruns/study.db")["Module"]
    assert later["timed"] == advice["timed"] and later["spent"] >= advice["spent"]
    other = advise(folder, "Module", "--budget", "50s", "--goal.error", 0.04, "--trials", 3)
    assert other.returncode == 2 and "another configuration" in other.stderr


@pytest.mark.long
def test_a_goal_that_nobody_meets_is_no_error(tmp_path):
    for budget in BUDGETS:
        done = advise(
            tmp_path, "Hopeless", "--budget", f"{budget}s", "--trials", 2, "--goal.max_steps", 20
        )
        assert done.returncode in (0, 3), done.stderr
        if "No trial met the goal" in done.stdout:
            break
    assert (
        "B_crit is not identifiable: K is known at no batch size" in done.stdout
        and "no answer" in done.stdout
    )
    assert re.search(r"note: No trial met the goal within 20 steps, at B = \d", done.stdout)
    assert not (tmp_path / "mlruns" / "figures" / "Hopeless" / "advice" / "fit.yaml").exists()


@pytest.mark.long
def test_branches_give_a_configuration_with_times_without_a_probe(tmp_path):
    for budget in BUDGETS[1:]:
        done = advise(
            tmp_path,
            "Module",
            "--budget",
            f"{budget}s",
            "--method",
            "branch",
            "--goal.max_steps",
            100,
        )
        assert done.returncode in (0, 3), done.stderr
        if "the run met its goal" in done.stderr:
            break
    assert re.search(r"step 50: critical batch size \d+", done.stdout)
    where = tmp_path / "mlruns" / "figures" / "Module" / "advice"
    table = pd.read_csv(where / "answer.csv").set_index("batch_size")
    assert table.loc[32, "steps"] == table.loc[32, "steps_high"] == 75  # of the run that was forked
    assert (table["steps_low"] <= table["steps"]).all() and (
        table["hours_low"] < table["hours"]
    ).all()
    assert table.loc[64, "steps_low"] == 37.5  # twice the batch, nothing lost
    config = yaml.safe_load((where / "fit.yaml").read_text())
    size, rate = config["data"]["init_args"]["batch_size"], config["model"]["init_args"]["lr"]
    assert size >= 32 and rate == pytest.approx(
        0.1 * math.sqrt(size / 32)
    )  # as of an optimizer like Adam
    scaling, told = config["trainer"]["callbacks"]
    assert scaling["class_path"].endswith("AdamScalingCallback"), "the branches scaled by its rules"
    assert (
        told["class_path"].endswith("PredictionCallback")
        and told["init_args"]["batch_size"] == size
    )
    assert not list_studies(f"sqlite:///{tmp_path}/mlruns/study.db")
    client, run = shown(tmp_path, "Module-advice")
    assert 50 in {
        p.step for p in client.get_metric_history(run.info.run_id, "advice/critical_at_least")
    }
    assert "branches (Merrill" in run.data.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        ("Module", (), "--budget is missing; it must be a time above 0"),
        ("Module", ("--budget", "0"), "--budget is '0'; it must be a time above 0"),
        ("Module", ("--budget", "0m"), "--budget is '0m'"),
        (
            "Module",
            ("--budget", "1h", "--method", "guess"),
            "--method is 'guess'; it must be one of pilot, law, branch",
        ),
        (
            "Module",
            ("--budget", "1h", "--price", "-1"),
            "--price is -1.0; it must be a finite number above 0",
        ),
        ("Module", ("--budget", "1h", "--devices", "0,1"), "--devices is '0,1'"),
        ("Module", ("--budget", "1h", "--trials", "1"), "--trials is 1; it must be at least 2"),
        ("Module", ("--buget", "1h"), "--buget: 'buget' is not accepted; did you mean --budget?"),
        ("Unlogged", ("--budget", "1h"), "goal.monitor is 'val_error'"),
        (
            "Module",
            ("--budget", "1h", "--data", f"{HERE}.Sizeless"),
            "study.batch_size_key is 'data.batch_size'",
        ),
        (
            "Rateless",
            ("--budget", "1h"),
            "study.space is {}; it must be a range of the learning rate",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_created(tmp_path, module, options, said):
    done = advise(tmp_path, module, *options)
    assert (
        done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1
    )
    assert not (tmp_path / "mlruns").exists()


def test_data_that_do_not_heed_the_batch_size_are_refused_in_one_line(tmp_path):
    done = advise(tmp_path, "Module", "--budget", "1h", "--data", f"{HERE}.Fixed")
    assert (
        done.returncode == 2 and "a step is on 32 examples" in done.stderr.strip().splitlines()[-1]
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("budget", ["1s", "4.5s", "0.1m"])
def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_one(tmp_path, budget):
    done = advise(tmp_path, "Module", "--budget", budget)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and "--budget is " in line
    assert int(re.search(r"at least (\d+)s", line)[1]) >= 15
    assert not (tmp_path / "mlruns").exists()


def test_a_budget_too_small_for_one_probe_says_so_and_keeps_what_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    done = advise(tmp_path, "Module", "--budget", "1s", "--trials", 4)
    assert done.returncode == 3, done.stderr
    assert (
        "note: The budget was too small for one probe" in done.stdout
        and "A probe of 4 trials takes up to" in done.stdout
    )
    kept = list_advice(f"sqlite:///{tmp_path}/mlruns/study.db")["Module"]
    assert kept["timed"] and kept["spent"] > 0
    assert "max_steps" not in kept and kept["configuration"]["goal"]["max_steps"] == 400, (
        "the user's own"
    )

    def refuse(*args):
        raise StorageError("the disk is full")

    for name in ("_ask", "Clock.save"):
        monkeypatch.setattr(f"lit_dps.advice.run.{name}", refuse)
    full = advise(tmp_path, "Module", "--budget", "1s", "--trials", 4)
    assert full.returncode in (0, 3) and "advice on Module: goal error 0.05" in full.stdout
    assert "asking ends early: the disk is full" in full.stderr
    assert "the time that was spent is not stored: the disk is full" in full.stderr


def test_json_alone_is_on_stdout_and_says_that_nothing_is_identifiable(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    done = advise(tmp_path, "Module", "--json", "--budget", "1s", "--trials", 4)
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "not identifiable" and document["source"] == "measured"
    assert document["name"] == "Module" and document["recommendation"] is None
    assert document["measured"] == [] and document["next_run"] is None
    assert "note: The budget was too small for one probe" in done.stderr
    refused = advise(tmp_path, "Module", "--budget", "1s", "--columns", "batch_size=b")
    assert refused.returncode == 2 and "--columns is 'batch_size=b'" in refused.stderr


def test_a_budget_of_steps_is_proposed_once_and_schedules_see_it(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    given = (
        "advise",
        "--method",
        "law",
        "--config",
        configuration(tmp_path, "Scheduled", max_steps=None),
        "--trials",
        4,
    )
    first = run_here(tmp_path, *given, "--budget", "1s")
    assert first.returncode in (0, 3), first.stderr
    kept = list_advice(f"sqlite:///{tmp_path}/mlruns/study.db")["Scheduled"]
    steps = kept["max_steps"]
    assert steps % 5 == 0 and kept["configuration"]["goal"]["max_steps"] == steps
    assert (
        f"goal.max_steps: {steps}" in first.stderr and f"goal.max_steps = {steps}" in first.stdout
    )
    assert 40_000 in Scheduled.seen and Scheduled.seen[-1] == steps
    Scheduled.seen.clear()
    again = run_here(tmp_path, *given, "--budget", "2s")
    assert again.returncode in (0, 3) and f"goal.max_steps: {steps}" in again.stderr
    assert set(Scheduled.seen) == {steps}, "another --budget keeps the number"
    other = run_here(tmp_path, *given, "--budget", "2s", "--goal.max_steps", steps + 5)
    assert (
        other.returncode == 2 and f"goal.max_steps was {steps} and is {steps + 5}" in other.stderr
    )
