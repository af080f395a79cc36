"""lit-dps advise: the user's run as the pilot, then runs at larger batch sizes, on a module
whose law is known."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from lit_dps.advice import run as advising_run
from lit_dps.advice import step_probe
from lit_dps.advice.pilot_evidence import LUCK_OF_RATES
from lit_dps.advice.probe_study import Probes
from lit_dps.storage.advice_store import list_advice
from lit_dps.storage.read import read_study
from lit_dps.study.probe_run import RunTimes
from tests.e2e import advised_user
from tests.e2e.advised_user import C1, C2
from tests.e2e.commands import run_here
from tests.e2e.test_advise import configuration, shown

pytestmark = pytest.mark.slow

K_OF_PILOT = 75  # C1 / 32 + C2, at the best rate


@pytest.fixture(autouse=True)
def step_times(monkeypatch):
    """Steps take 10 ms and little more for each example, as on a GPU that is not full."""

    def step_seconds(batch_size):
        return 0.01 + 1e-5 * batch_size

    def timed(setup, trial, steps, on_all_ranks=False, **options):
        if trial.cell.batch_size > 1024:
            raise MemoryError
        return RunTimes(0.0, step_seconds(trial.cell.batch_size), 0.001)

    def measured(self, run):
        share_of_checks = 0.001 * run.timed["checks"] / run.timed["steps"]
        return step_seconds(run.trial.cell.batch_size) + share_of_checks

    monkeypatch.setattr("lit_dps.advice.step_probe.timed_run", timed)
    monkeypatch.setattr("lit_dps.advice.measured_runs.MeasuredRuns.step_seconds", measured)


def ask(folder, module: str = "Module", *options: object):
    return run_here(folder, "advise", "--config", configuration(folder, module), *options)


def stored(folder, module: str = "Module") -> dict:
    return list_advice(f"sqlite:///{folder}/mlruns/study.db")[module]


def runs_of(folder) -> dict[int, list]:
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "Module-advice")
    return {cell.batch_size: results for cell, results in record.results.items() if results}


def steps_of(folder) -> dict[int, list]:
    """Rate, status and steps of all runs by batch size."""
    found = {}
    for size, results in runs_of(folder).items():
        found[size] = [(r.trial.params["model.lr"], r.status, r.steps) for r in results]
    return found


def test_the_users_run_and_a_few_larger_batches_give_the_curve(tmp_path, monkeypatch):
    done = ask(tmp_path, "Module", "--devices", "1,2", "--bandwidth", 1e9)
    assert done.returncode == 0, done.stderr
    pilot = stored(tmp_path)["pilot"]
    assert pilot["steps"] == K_OF_PILOT
    runs = runs_of(tmp_path)
    assert len(runs) > 1 and min(runs) == 32, "the pilot is the smallest batch that was run"
    # All other runs together take no more steps than the pilot by more than its 2 trainings.
    others = sum(r.steps_run for size in runs if size > 32 for r in runs[size])
    assert others <= 2 * K_OF_PILOT
    table = pd.read_csv(tmp_path / "mlruns/figures/Module/advice/answer.csv")
    table = table.drop_duplicates("batch_size").set_index("batch_size")
    sizes = table.index.to_numpy()
    truth = C1 / sizes + C2
    error = np.log(table["steps"] / truth).to_numpy()
    inside = (table["steps_low"] <= truth) & (truth <= table["steps_high"])
    assert inside.mean() > 0.7
    # What is printed first tells what will be done, and what it costs.
    told = done.stderr
    assert told.index("your run comes first") < told.index("timing steps")
    # docs/advise_measuring.py reads the announced cost by this pattern.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    announced = importlib.import_module("advise_measuring").ANNOUNCED.search(told)
    assert announced[1] == "2" and announced.start() < told.index("\nyour run: B = 32")
    assert told.index("before any run") < told.index("\nyour run: B = 32")
    file = tmp_path / "mlruns" / "checkpoints" / "Module" / "pilot.ckpt"
    assert torch.load(file, weights_only=True)["global_step"] == K_OF_PILOT
    # The same command measures nothing again.
    before = steps_of(tmp_path)
    again = ask(tmp_path, "Module", "--devices", "1,2", "--bandwidth", 1e9, "--json")
    assert again.returncode == 0 and steps_of(tmp_path) == before
    document = json.loads(again.stdout)
    assert document["status"] == "answered" and document["source"] == "measured"
    assert document["measured"][0]["steps"] == K_OF_PILOT
    # Advice takes the least of several rates to be lucky. These runs have no noise, so steps are
    # too many by this at most, at each batch size from B0 / 4 to 64 B0.
    luck = max(math.log(each["expected_steps"] / each["steps"]) for each in document["measured"])
    assert luck == pytest.approx(LUCK_OF_RATES[2])
    assert (np.abs(error - luck / 2) <= luck / 2 + 0.05).all(), error
    chosen_size = document["recommendation"]["batch_size"]
    assert "\nyour run: B = 32" not in again.stderr and "timing steps" not in again.stderr
    chosen = yaml.safe_load((tmp_path / "mlruns/figures/Module/advice/fit.yaml").read_text())
    assert chosen["data"]["init_args"]["batch_size"] == chosen_size > 32
    file = tmp_path / "mlruns/figures/Module/advice/fit.yaml"
    fit = ("fit", "--config", file, "--trainer.devices", 1)
    # A run with another rate is no outcome of the prediction.
    other = run_here(tmp_path, *fit, "--model.lr", 1e-4)
    assert other.returncode == 0 and "not stored" in other.stderr
    fitted = run_here(tmp_path, *fit)
    assert fitted.returncode == 0 and "complete after" in fitted.stdout, fitted.stderr
    calibration = run_here(tmp_path, "calibration")
    assert "of 1 within the 95 % limits" in calibration.stdout
    client, run = shown(tmp_path, "Module-advice")
    assert run.data.metrics["advice/batch_size"] == chosen["data"]["init_args"]["batch_size"]
    assert "Train with B = " in run.data.tags["mlflow.note.content"]
    timed = client.get_metric_history(run.info.run_id, "advice/step_seconds")
    assert {point.step: point.value for point in timed} == {
        row[0]: row[1] for row in stored(tmp_path)["timed"] if row[2] == 1
    }


@pytest.mark.long  # the command killed between two runs is tested always
def test_a_command_that_ends_in_the_pilot_goes_on_as_an_unbroken_one(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert ask(whole).returncode == 0
    monkeypatch.setattr(advising_run, "MIN_MEASURING_SECONDS", -1e3)
    monkeypatch.setattr("lit_dps.training.checkpoint_files.MIN_SECONDS_WORTH_SAVING", 0.0)
    first = ask(broken, "Module", "--budget", "1s")
    assert first.returncode == 3 and "pilot" not in stored(broken)
    assert stored(broken)["budget"] == 1
    assert ask(broken, "Module", "--budget", "0.5s").returncode == 2, "less than before"
    assert ask(broken).returncode == 0
    assert steps_of(broken) == steps_of(whole)
    assert stored(broken)["pilot"]["steps"] == K_OF_PILOT


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_command_that_is_killed_between_two_runs_goes_on_as_an_unbroken_one(
    tmp_path, monkeypatch, after
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert ask(whole).returncode == 0
    run, calls = Probes.run, []

    def killed(self, *args, **options):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return run(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Probes, "run", killed)
        with contextlib.suppress(KeyboardInterrupt):
            ask(broken)
    assert len(calls) == after
    assert ask(broken).returncode == 0
    assert steps_of(broken) == steps_of(whole)


class Killed(BaseException):
    """Ends the process at any place, and no code handles it."""


def end_at(stage: str, signal_number: int | None):
    """Return a validation step that ends the command once, within a stage."""
    validation_step, ended = advised_user.Module.validation_step, []

    def ending_step(self, batch, batch_idx):
        is_pilot = self.size == 32 and self.trainer.global_step == 40
        is_probe = self.size > 32 and self.trainer.global_step == 20
        if not ended and {"pilot": is_pilot, "probe": is_probe}[stage]:
            ended.append(stage)
            if signal_number is None:
                raise Killed
            os.kill(os.getpid(), signal_number)
        validation_step(self, batch, batch_idx)

    return ending_step, ended


@pytest.mark.long
@pytest.mark.parametrize("signal_number", [signal.SIGINT, None])
@pytest.mark.parametrize("stage", ["pilot", "probe"])
def test_a_command_that_ends_within_a_run_goes_on_as_an_unbroken_one(
    tmp_path, monkeypatch, stage, signal_number
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert ask(whole).returncode == 0
    step, ended = end_at(stage, signal_number)
    with monkeypatch.context() as patch:
        patch.setattr(advised_user.Module, "validation_step", step)
        if signal_number is None:
            with contextlib.suppress(Killed):
                ask(broken)
        else:
            assert ask(broken).returncode == 130
    assert ended == [stage]
    assert ("pilot" in stored(broken)) == (stage == "probe")
    again = ask(broken)
    assert again.returncode == 0 and "timing steps" not in again.stderr
    assert ("\nyour run: B = 32" in again.stderr) == (stage == "pilot")
    assert steps_of(broken) == steps_of(whole)
    table = "mlruns/figures/Module/advice/answer.csv"
    sizes = pd.read_csv(whole / table)["steps"]
    assert pd.read_csv(broken / table)["steps"].tolist() == pytest.approx(sizes.tolist())


@pytest.mark.long
def test_a_command_that_ends_while_steps_are_timed_times_them_again(tmp_path, monkeypatch):
    timed, calls = step_probe.timed_run, []

    def interrupted(setup, trial, steps, *args, **options):
        calls.append(trial.cell.batch_size)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return timed(setup, trial, steps, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(step_probe, "timed_run", interrupted)
        assert ask(tmp_path).returncode == 130
    assert len(calls) == 3 and "timed" not in stored(tmp_path)
    done = ask(tmp_path)
    assert done.returncode == 0 and "timing steps" in done.stderr
    assert stored(tmp_path)["pilot"]["steps"] == K_OF_PILOT


def test_a_run_that_misses_its_goal_is_told_and_identifies_nothing(tmp_path):
    done = ask(tmp_path, "Hopeless", "--json", "--goal.max_steps", 20)
    assert done.returncode == 3, done.stderr
    assert "did not meet the goal in 20 steps" in done.stderr
    assert stored(tmp_path, "Hopeless")["bounds"] == [[32, 20.0]]
    assert json.loads(done.stdout)
    again = ask(tmp_path, "Hopeless", "--goal.max_steps", 20)
    assert again.returncode == 3 and "\nyour run: B = 32" not in again.stderr


@pytest.mark.long
def test_a_rate_that_is_far_too_small_is_noticed_and_run_again(tmp_path, monkeypatch):
    """The module needs e^(0.4 |log(rate / 0.1)|) as many steps: the pilot at 0.002 takes 4.8 K."""
    monkeypatch.setattr("tests.e2e.advised_user.STEEPNESS", 0.4)
    # The noise scale of the module's loss has nothing to do with its progress.
    monkeypatch.setattr(advising_run, "_can_read_noise", lambda session: False)
    done = ask(tmp_path, "Module", "--model.lr", 0.002, "--goal.max_steps", 800)
    assert done.returncode == 0, done.stderr
    assert "your learning rate may be too small" in done.stderr
    at_user_size = steps_of(tmp_path)[32]
    rates = [rate for rate, _, steps in at_user_size if steps is not None]
    assert min(rates) > 0.004, "the larger rate gives K, and the race cuts the pilot"
    assert stored(tmp_path)["pilot"]["steps"] > 3 * K_OF_PILOT


def test_options_have_no_budget_by_default_for_the_pilot_alone():
    from lit_dps.advice.options import Options
    from lit_dps.core.errors import ConfigError

    assert dataclasses.asdict(Options())["method"] == "pilot"
    with pytest.raises(ConfigError) as refused:
        Options(method="branch")
    assert refused.value.key == "--budget"
