"""Runs of what advice recommends: fresh seeds, their goal and patience, what is stored, and going
on."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.advice.one_run import ratio_of_one_run
from lit_dps.advice.options import Clock
from lit_dps.advice.recommendation import VERIFICATION_RUNS, verify_recommendation
from lit_dps.analysis.rates import rate_law
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from tests.support.setups import setup_of
from tests.unit.analysis.test_answer import GOAL as OTHER_GOAL
from tests.unit.analysis.test_answer import trial
from tests.unit.engines.test_engine import GOAL, WORKLOAD, quiet  # noqa: F401

PRUNING = {"method": "snip", "biases": "paper", "batch_size": 100}
PARAMS = {"model.learning_rate": 0.02}
SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}


@pytest.fixture
def setup(tmp_path):
    study = StudyConfig("mine", [32], [0.0], trials=2, workers=1, space=dict(SPACE))
    return setup_of(
        study, StorageConfig(str(tmp_path)), WORKLOAD, GOAL, PRUNING, {"interval": None}
    )


def run(setup, store, k, budget=1e6, params=PARAMS):
    verify_recommendation(setup, 32, params, k, store, Clock(budget, store, 0.0), StopRequest())
    return store.read().get("confirmed", [])


def test_it_is_run_on_fresh_seeds_and_stored_once(setup, tmp_path):
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "mine")
    found = run(setup, store, 60.0)
    assert len(found) == VERIFICATION_RUNS and {each["batch_size"] for each in found} == {32}
    assert all(each["steps"] % 4 == 0 and each["timed"]["steps"] == each["steps"] for each in found)
    assert len({each["steps"] for each in found}) > 1, "seeds differ"
    assert run(setup, store, 60.0) == found, "what was run is not run again"
    told = ratio_of_one_run(found, {32: 10.0}, None, None, "")
    assert told.steps == tuple(sorted(each["steps"] for each in found))
    assert told.ratio == pytest.approx(told.steps[1] / 10)


def test_a_run_is_left_after_three_times_k_and_counts_as_more(setup, tmp_path):
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "mine")
    found = run(setup, store, 3.0, params={"model.learning_rate": 1e-6})
    assert [(each["steps"], each["most"], each["timed"]["steps"]) for each in found] == [
        (None, 12, 12)
    ] * VERIFICATION_RUNS
    assert ratio_of_one_run(found, {32: 3.0}, None, None, "").ratio == math.inf


def test_without_time_nothing_is_run(setup, tmp_path):
    store = AdviceStore(f"sqlite:///{tmp_path}/study.db", "mine")
    assert run(setup, store, 60.0, budget=0.001) == []


def test_without_runs_trials_near_the_rate_tell():
    key = "model.learning_rate"
    results = {8: [(0.01, 100), (0.011, 120), (0.5, 300)], 32: [(0.02, 40), (0.03, 44)]}
    found = StudyRecord(
        name="made up", workload="digits", goal=OTHER_GOAL, space=SPACE, batch_sizes=(8, 32), sparsities=(0.0,),
        trials=3, seed=0, goals=(), race_factor=None, config={}, running={Cell(8): 0, Cell(32): 0},
        results={Cell(b): [trial(b, i, k, 1.0, rate=x) for i, (x, k) in enumerate(r)] for b, r in results.items()},
    )  # fmt: skip
    rate = rate_law([8, 32], [0.01, 0.02], key)
    told = ratio_of_one_run([], {}, found, rate, key)
    assert told.source == "trials" and told.ratios == pytest.approx((1, 1, 1.1, 1.2))
    assert told.ratio == pytest.approx(math.sqrt(1.1))
    both = dataclasses.replace(found, space={**SPACE, "model.momentum": Range(0.0, 0.9)})
    assert ratio_of_one_run([], {}, both, rate, key) is None, (
        "of another metaparameter they are not near"
    )
