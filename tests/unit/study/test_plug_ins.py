"""Plug-ins of users are tested before a study starts: what is refused, and that trials stay."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import Cell, Trial
from lit_dps.readings.registry import resolve_readings
from lit_dps.study.preflight.plug_ins import check_plug_in, check_plug_ins, foreign_plug_ins
from lit_dps.training.hidden_state import capture_rng_state, equal_states
from lit_dps.training.workload import Workload
from tests.e2e.commands import run_here
from tests.support.errors import refuses
from tests.support.recipes import import_recipe
from tests.support.runs import train_one
from tests.support.setups import setup_of
from tests.unit.engines.test_engine import DATA, quiet  # noqa: F401

HERE = "tests.support.plug_ins"
ARGUMENTS = {
    "network": {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [8]}},
    "momentum": 0.5,
}
GOOD = {
    "pruner": f"{HERE}.Powers",
    "options": {"power": 2.0},
    "rule": f"{HERE}.SIGN",
    "reading": {"class_path": f"{HERE}.Scaled", "init_args": {"factor": 2.0}},
    "goal": f"{HERE}.Twice",
    "checks": {"checks": 2},
    "batch": "constant",
    "statistic": f"{HERE}.NamedByItself",
}


def setup(grid=None, **changes):
    """A study with a plug-in of each kind."""
    used = {**GOOD, **changes}
    model = {
        "class_path": "lit_dps.module.ImageClassifier",
        "init_args": {**ARGUMENTS, "optimizer": used["rule"]},
    }
    config = StudyConfig(
        space={"model.learning_rate": Range(1e-3, 0.1, "log"), **used.get("space", {})},
        grid={"data.batch_size": [8, 16], "pruning.sparsity": [0.0, 0.5], **(grid or {})},
        trials=2,
        statistic=used["statistic"],
        readings=[used["reading"]],
    )
    goal = {
        "error": 0.5,
        "check_interval": 4,
        "max_steps": 16,
        "rule": used["goal"],
        "options": used["checks"],
    }
    pruning = {"method": used["pruner"], "options": used["options"]}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    batch = {"schedule": used["batch"]}
    return setup_of(config, StorageConfig(), workload, goal, pruning, batch=batch)


def test_trials_are_equal_to_the_bit_with_and_without_the_tests():
    study = setup()
    trial = Trial(Cell(16, 0.5), 0, {"model.learning_rate": 0.01})
    options = {
        "readings": resolve_readings([GOOD["reading"]]),
        "pruning": {"method": GOOD["pruner"], "options": GOOD["options"]},
    }
    goal = {**study.goal.__dict__, "early_reject": False}

    def train():
        return replace(train_one(trial, study.workload, goal, **options), seconds=0.0)

    before = train()
    assert before.readings["scaled"]["scaled"] and before.kept
    state = capture_rng_state()
    assert check_plug_ins(study) == []
    assert equal_states(capture_rng_state(), state)
    assert train() == before


@pytest.mark.parametrize(
    ("changes", "key", "call"),
    [
        ({"pruner": f"{HERE}.Drawing"}, "pruning.method", "check_pruner({}(power=2.0))"),
        ({"rule": f"{HERE}.COUNTING"}, "model.optimizer", "check_rule({})"),
        (
            {"reading": {"class_path": f"{HERE}.Growing", "init_args": {"factor": 3.0}}},
            "study.readings",
            "check_reading({}(factor=3.0))",
        ),
        ({"goal": f"{HERE}.Remembering"}, "goal.rule", "check_goal({}(checks=2))"),
        ({"goal": f"{HERE}.Unspeakable"}, "goal.rule", "check_goal({}(checks=2))"),
        ({"statistic": f"{HERE}.InLines"}, "study.statistic", "check_statistic({}())"),
        ({"batch": f"{HERE}.Drawn"}, "batch.schedule", "check_schedule({}())"),
    ],
)
def test_a_broken_plug_in_is_refused_with_its_test(changes, key, call):
    (name,) = changes.values()
    if isinstance(name, dict):
        name = name["class_path"]
    with refuses(key, name) as refused:
        check_plug_ins(setup(**changes))
    assert call.format(name) in str(refused.value.hint)
    assert "\n" not in str(refused.value)


def test_plug_ins_on_axes_are_tested_each_once():
    grid = {
        "pruning.method": ["snip", GOOD["pruner"]],
        "model.optimizer": ["sgd", GOOD["rule"]],
    }
    calls = [each.call for each in foreign_plug_ins(setup(grid, rule="sgd", options={}))]
    expected = ["Twice(checks=2)", "NamedByItself()", "Scaled(factor=2.0)", "Powers()", "SIGN"]
    assert calls == [f"{HERE}.{call}" for call in expected]
    grid = {"pruning.options.power": [1.0, 3.0]}
    study = setup(grid, rule="sgd", reading="tests.support.user_readings.FinalNorm")
    calls = [plug_in.call for plug_in in foreign_plug_ins(study)]
    assert calls[3:] == [f"{HERE}.Powers(power=1.0)", f"{HERE}.Powers(power=3.0)"]
    with refuses("pruning.method", f"{HERE}.Drawing"):
        check_plug_ins(setup({"pruning.method": ["snip", f"{HERE}.Drawing"]}, options={}))


def test_a_plug_in_that_is_a_choice_of_the_search_is_tested():
    space = {"model.optimizer": Choices(["sgd", f"{HERE}.COUNTING"])}
    with refuses("model.optimizer", f"{HERE}.COUNTING"):
        check_plug_ins(setup(rule="sgd", space=space))


def test_a_plug_in_that_the_small_network_does_not_suit_is_noted():
    (note,) = check_plug_ins(setup(pruner=f"{HERE}.ForText"))
    assert note.startswith(f"{HERE}.ForText ") and "KeyError" in note


def test_a_hyperparameter_that_is_no_number_is_noted(monkeypatch):
    build = Workload.module

    def module(workload, trial):
        built = build(workload, trial)
        built.hparams["momentum"] = None  # such as the default of a subclass
        return built

    monkeypatch.setattr(Workload, "module", module)
    (note,) = check_plug_ins(setup(rule=f"{HERE}.SIGN"))
    assert note.startswith(f"{HERE}.SIGN ") and "TypeError" in note


def test_the_recipes_pass_within_a_second_of_cpu_time_each(tmp_path, monkeypatch):
    for name in ("my_pruner", "my_exchange", "my_lars", "my_reading", "my_goal"):
        import_recipe(name, tmp_path, monkeypatch)
    studies = [
        setup(pruner="my_exchange.Exchange", options={"every": 5}, rule="my_lars.LARS"),
        setup(pruner="my_pruner.SnipTwice", options={}, reading="my_reading.Sharpness"),
        setup(goal="my_goal.Settled", reading="tests.support.user_readings.FinalNorm"),
    ]
    tested = set()
    for study in studies:
        for plug_in in foreign_plug_ins(study):
            begin = time.process_time()
            assert check_plug_in(plug_in) is None
            assert time.process_time() - begin < 1, plug_in
            tested.add(plug_in.name)
    assert {"my_exchange.Exchange", "my_pruner.SnipTwice", "my_lars.LARS"} <= tested
    assert {"my_reading.Sharpness", "my_goal.Settled"} <= tested


def test_a_study_with_a_broken_plug_in_creates_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"""
model:
  class_path: lit_dps.module.ImageClassifier
  init_args: {{network: lit_dps.models.MLP}}
data: lit_dps.data.Digits
trainer: {{accelerator: cpu}}
goal: {{error: 0.5, rule: {HERE}.Remembering, options: {{checks: 2}}}}
study: {{space: {{model.learning_rate: {{low: 0.01, high: 0.1}}}}}}
""")
    done = run_here(tmp_path, "study", "--config", "mine.yaml")
    assert done.returncode == 2
    *notes, line = done.stderr.splitlines()
    assert len(notes) == 1 and notes[0].startswith("note: no check stops early")
    assert f"check_goal({HERE}.Remembering(checks=2))" in line and "values [" in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
