"""lit-dps advise on a user's module: refusals, budgets, branches, JSON, a proposed max_steps."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import mlflow
import optuna
import pandas as pd
import pytest
import yaml
from mlflow.entities import Run

from lit_dps.advice import run as advising_run
from lit_dps.core.errors import StorageError
from lit_dps.storage.advice_store import AdviceStore, list_advice
from lit_dps.storage.read import list_studies
from tests.e2e.advised_user import Scheduled
from tests.e2e.commands import run_here
from tests.support.errors import error_line, refusals_in
from tests.support.fake_study import law_study
from tests.support.texts import in_one_line, numbers_in

HERE = "tests.e2e.advised_user"
BUDGETS = (60, 120, 240)


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
    return run_here(folder, "advise", "--config", configuration(folder, module), *options)


def shown(folder, name: str) -> tuple[mlflow.MlflowClient, Run]:
    """MLflow's run of a study."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    (found,) = client.search_runs(["1"], f"run_name = '{name}'")
    return client, found


@pytest.mark.long
def test_branches_give_a_configuration_with_times_without_a_probe(tmp_path):
    for budget in BUDGETS:
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
        if "the run met the goal" in done.stderr:
            break
    assert re.search(r"(Batches up to|No batch above) \d+ .*lose nothing at step 50", done.stdout)
    assert "Forks cost more than a probe" in in_one_line(done.stderr)
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
    assert "forks (Merrill" in run.data.tags["mlflow.note.content"]


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        ("Module", ("--method", "branch"), "--budget is missing; it must be a time above 0"),
        (
            "Module",
            ("--method", "law"),
            "--method is 'law'; it must be pilot or branch; `lit-dps study` searches",
        ),
        ("Module", ("--budget", "0"), "--budget is '0'; it must be a time above 0"),
        ("Module", ("--budget", "0m"), "--budget is '0m'"),
        (
            "Module",
            ("--budget", "1h", "--method", "guess"),
            "--method is 'guess'; it must be pilot or branch",
        ),
        (
            "Module",
            ("--budget", "1h", "--price", "-1"),
            "--price is -1.0; it must be a finite number above 0",
        ),
        ("Module", ("--price", "nan"), "--price is nan; it must be a finite number"),
        ("Module", ("--budget", "1h", "--devices", "0,1"), "--devices is '0,1'"),
        (
            "Module",
            ("--devices", "1,1"),
            "--devices is '1,1'; it must be different numbers of devices such as 1,2,4,8",
        ),
        ("Module", ("--trials", "8"), "--trials: 'trials' is not accepted"),
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


def test_a_schedule_that_fails_before_the_last_step_is_refused_before_any_run(tmp_path):
    done = advise(tmp_path, "OneCycle")
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "goal.max_steps is 400; it must be at most 100" in line
    assert "Traceback" not in done.stderr and not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize("budget", ["1s", "4.5s", "0.1m"])
def test_a_budget_that_cannot_be_kept_is_refused_with_the_least_one(tmp_path, budget):
    done = advise(tmp_path, "Module", "--budget", budget)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and "--budget is " in line
    assert int(re.search(r"at least (\d+)s", line)[1]) >= 15
    assert not (tmp_path / "mlruns").exists()


def test_a_budget_too_small_for_the_users_run_keeps_what_was_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    done = advise(tmp_path, "Module", "--budget", "1s")
    assert done.returncode == 3, done.stderr
    kept = list_advice(f"sqlite:///{tmp_path}/mlruns/study.db")["Module"]
    assert kept["timed"] and kept["spent"] > 0
    assert "max_steps" not in kept and kept["configuration"]["goal"]["max_steps"] == 400, (
        "the user's own"
    )

    def refuse(*args):
        raise StorageError("the disk is full")

    for name in ("_ask", "Clock.save"):
        monkeypatch.setattr(f"lit_dps.advice.run.{name}", refuse)
    full = advise(tmp_path, "Module", "--budget", "1s")
    assert full.returncode == 3 and "advice on Module: goal error 0.05" in full.stdout
    assert "the disk is full" in full.stderr
    assert "the spent time" in full.stderr and "the disk is full" in full.stderr


def test_json_alone_is_on_stdout_and_says_that_nothing_is_identifiable(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    done = advise(tmp_path, "Module", "--json", "--budget", "1s")
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "no result" and document["source"] == "measured"
    assert document["name"] == "Module" and document["recommendation"] is None
    assert document["measured"] == [] and document["next_run"] is None
    refused = advise(tmp_path, "Module", "--budget", "1s", "--columns", "batch_size=b")
    assert refused.returncode == 2 and refusals_in(refused.stderr) == [
        ("--columns", "'batch_size=b'")
    ]


def test_stored_advice_of_the_removed_method_law_is_refused_in_one_line(tmp_path):
    """Its probes are a study NAME-advice, and it has no note about the noise scale."""
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    (tmp_path / "mlruns").mkdir()
    law_study(optuna.storages.RDBStorage(url), "Module-advice")
    AdviceStore(url, "Module").keep(spent=10.0, noise=None, confirmed=[])
    for options in ((), ("--method", "branch", "--budget", "1h")):
        done = advise(tmp_path, "Module", *options)
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert "measured by the method law, which was removed" in line
    assert list_advice(url)["Module"] == {"spent": 10.0, "noise": None, "confirmed": []}


def test_a_second_command_on_the_same_advice_is_refused_in_one_line(tmp_path):
    """Another process holds the lock of the advice, as its command does from begin to end."""
    url = f"sqlite:///{tmp_path}/mlruns/study.db"
    (tmp_path / "mlruns").mkdir()
    AdviceStore(url, "Module").keep(spent=1.0)
    held = (
        "import sys; from lit_dps.storage.advice_store import AdviceStore\n"
        f"with AdviceStore({url!r}, 'Module').sole_command(): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        done = advise(tmp_path, "Module")
        other.communicate(b"\n")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "study.name 'Module'" in line
    assert list_advice(url)["Module"] == {"spent": 1.0}
    with AdviceStore(url, "Module").sole_command():
        pass


def test_a_storage_folder_that_cannot_be_created_is_refused_in_one_line(tmp_path):
    (tmp_path / "mlruns").write_text("a file")
    done = advise(tmp_path, "Module")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "mlruns/study.db" in line


def test_a_budget_of_steps_is_proposed_once_and_schedules_see_it(tmp_path, monkeypatch):
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    config = configuration(tmp_path, "Scheduled", max_steps=None)
    given = ("advise", "--config", config)
    first = run_here(tmp_path, *given, "--budget", "1s")
    assert first.returncode == 3, first.stderr
    kept = list_advice(f"sqlite:///{tmp_path}/mlruns/study.db")["Scheduled"]
    steps = kept["max_steps"]
    assert steps % 5 == 0 and kept["configuration"]["goal"]["max_steps"] == steps
    assert f"goal.max_steps: {steps}" in first.stderr
    assert 40_000 in Scheduled.seen and Scheduled.seen[-1] == steps
    Scheduled.seen.clear()
    again = run_here(tmp_path, *given, "--budget", "2s")
    assert again.returncode == 3 and f"goal.max_steps: {steps}" in again.stderr
    assert set(Scheduled.seen) == {steps}, "another --budget keeps the number"
    other = run_here(tmp_path, *given, "--budget", "2s", "--goal.max_steps", steps + 5)
    assert other.returncode == 2 and numbers_in(
        error_line(other.stderr).partition("goal.max_steps")[2]
    )[:2] == [steps, steps + 5]
