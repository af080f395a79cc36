"""Readings of local SGD look at the average of the workers: in each loop, on ranks, resumed."""

from __future__ import annotations

import pytest
import torch

from lit_dps.core.config import StorageConfig
from lit_dps.core.trial import LIGHTNING, SINGLE, Cell, Trial
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.readings.registry import READINGS, resolve_readings
from lit_dps.study.preflight.check import check_configuration
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.runs import train_one
from tests.support.saved_study import Study as SavedStudy
from tests.support.setups import setup_of, training_of
from tests.support.user_readings import Sharpness, Wrong, norm_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.readings.test_readings import GOAL, PARAMS, WORKLOAD
from tests.unit.readings.test_readings_of_a_study import setup

HERE = __name__
# The checks after 4, 8 and 16 steps are within a round, and the one after 12 at its end.
LOCAL = {"workers": 2, "steps": 6, "outer_learning_rate": 0.7, "outer_momentum": 0.5}
TRIAL = Trial(Cell(16, 0.5), 0, PARAMS)


class WrongOfRanks(Wrong):
    """The validation error, which each rank computes on the entire split."""

    over_ranks = True


class EndNorm(Wrong):
    """The norm of the weights at the end, and whether `start` has seen the network."""

    name = "end_norm"
    when = "end"
    over_ranks = True

    def start(self, moment):
        self.first = norm_of(moment)

    def read(self, moment):
        return {"end_norm": norm_of(moment), "first_norm": self.first}


class Counting(Wrong):
    """Counts steps."""

    def count(self, rate):
        self.flags["counted"] = self.flags.get("counted", 0) + 1


READ = [f"{HERE}.WrongOfRanks", f"{HERE}.EndNorm", "examples"]


def read(entries=READ, lean=True, **options):
    """The result of a trial of local SGD with readings."""
    readings = resolve_readings(entries)
    return train_one(TRIAL, WORKLOAD, GOAL, readings=readings, local=LOCAL, lean=lean, **options)


@pytest.mark.parametrize("lean", [True, False])
def test_readings_at_checks_and_at_the_end_are_of_the_averaged_network(lean):
    result = read(lean=lean)
    assert result.engine == (SINGLE if lean else LIGHTNING), result.engine_reason
    assert result.readings["wrong"]["step"] == result.curve["step"] == [4, 8, 12, 16]
    assert result.readings["wrong"]["wrong"] == pytest.approx(result.curve["val_error"], rel=1e-6)
    assert result.readings["examples"]["examples_seen"] == [64, 128, 192, 256]
    plain = read([], lean=lean)
    for column, values in plain.curve.items():
        assert result.curve[column] == values


def test_both_loops_read_the_same_numbers():
    ours = read([*READ, "gradient_noise", "tests.support.user_readings.Sharpness"])
    theirs = read([*READ, "gradient_noise", "tests.support.user_readings.Sharpness"], lean=False)
    assert ours.readings == theirs.readings and ours.end_readings == theirs.end_readings
    assert len(set(ours.readings["gradient_noise"]["noise_scale"])) == 4
    assert ours.end_readings["end_norm"] != ours.end_readings["first_norm"]


def test_one_worker_of_the_pair_reads_another_network():
    """The average differs from each worker, so that a reading of a worker would be seen."""
    averaged = read().end_readings["end_norm"]
    study = SavedStudy(None, model=WORKLOAD.model, local=LOCAL, goal=GOAL)
    result, steps = study.run(TRIAL, saved=False, readings=resolve_readings(READ))
    assert result.end_readings["end_norm"] == averaged
    parameters = [parameter.detach().flatten() for parameter in steps.module.parameters()]
    assert float(torch.cat(parameters).norm()) == pytest.approx(averaged, rel=1e-6)


def read_on_rank() -> tuple:
    result = read(lean=False)
    return result.readings["wrong"], result.readings["examples"], result.end_readings


def test_ranks_read_what_one_process_reads():
    wrong, examples, ends = same_on_ranks(2, read_on_rank)
    alone = read(lean=False)
    assert examples == alone.readings["examples"]
    assert wrong["wrong"] == pytest.approx(alone.readings["wrong"]["wrong"], abs=2 / 179)
    assert ends == pytest.approx(alone.end_readings, rel=1e-4)


@pytest.mark.parametrize("lean", [True, False])
def test_a_resumed_trial_reads_the_same(tmp_path, lean):
    readings = resolve_readings([*READ, "gradient_noise"])
    options = {"local": LOCAL, "readings": readings, "lean": lean, "goal": GOAL}
    study = SavedStudy(tmp_path, model=WORKLOAD.model, **options)
    whole, _ = study.run(TRIAL, saved=False)
    assert study.run(TRIAL, interrupt=2)[0] is None
    resumed, _ = study.run(TRIAL)
    assert [line.rpartition(" ")[2] for line in study.said] == ["8"]
    assert resumed == whole


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("gradient_norm", "gradient_norm"),
        ("tests.support.user_readings.Norm", "norm"),
        (f"{HERE}.Counting", "wrong"),
    ],
)
def test_a_reading_that_follows_steps_is_refused(tmp_path, entry, name):
    made = setup(tmp_path, [entry])
    made = setup_of(made.study, StorageConfig(str(tmp_path)), WORKLOAD, GOAL, local=LOCAL)
    with refuses("study.readings", name):
        check_configuration(made)
    training = training_of(WORKLOAD, GOAL, readings=resolve_readings([entry]), local=LOCAL)
    assert ineligibility_reason(training, TRIAL)
    result = train_one(TRIAL, WORKLOAD, GOAL, readings=resolve_readings([entry]), local=LOCAL)
    assert "local.workers" in result.failure


def test_which_readings_follow_steps():
    follow = {name for name, kind in READINGS.items() if kind().follows_steps}
    assert follow == {"lipschitz", "gradient_norm"}
    assert not Sharpness().follows_steps


def test_a_study_with_peak_memory_and_step_seconds_passes_its_checks(tmp_path):
    made = setup(tmp_path, ["peak_memory", "step_seconds", "examples", "gradient_noise"])
    made = setup_of(made.study, StorageConfig(str(tmp_path)), WORKLOAD, GOAL, local=LOCAL)
    check_configuration(made)
    result = read(["peak_memory", "step_seconds"])
    assert result.end_readings["peak_memory"] > 1
    assert min(result.readings["step_seconds"]["step_seconds"]) > 0
