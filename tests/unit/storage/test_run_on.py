"""Runs that go on to the budget after their goal: the same K, and the whole curve."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.other_goals import at_goal
from lit_dps.analysis.theory import terms_of
from lit_dps.cli.study import read_setup
from lit_dps.core.attempt import Attempt, AttemptRules, Validation
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.report.text import protocol_text, readings_text, render
from lit_dps.storage.columns import decode_columns, encode_columns
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import check_unchanged, compare, declare
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.fake_study import result, theory_terms, write_study
from tests.support.ranks import same_on_ranks
from tests.support.runs import train, train_one
from tests.support.saved_study import Study
from tests.support.setups import check, setup_of
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401
from tests.unit.training.test_checkpoint_callback import assert_goes_on

PLAIN = Path(__file__).parents[3] / "configs" / "studies" / "width.yaml"
CELL = Cell(16, 0.0)
SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
WHOLE = {**GOAL, "error": 0.3, "max_steps": 60}


def ended(errors: list[float], losses: list[float] | None = None, run_on: bool = True) -> Attempt:
    """A run with these validation errors, checked every 4 steps, of 16 at most."""
    run = Attempt(Trial(CELL, 0), Goal(0.1, 4, 16), train_past_goal=run_on)
    for i, (error, loss) in enumerate(zip(errors, losses or [1.0] * len(errors), strict=True)):
        assert run.status is None
        run.record(Validation(4 + 4 * i, error, True, loss, True))
    return run


@pytest.mark.parametrize(
    ("errors", "losses", "status", "steps"),
    [
        (
            [0.5, 0.1, 0.3, 0.05],
            None,
            Status.COMPLETE,
            8,
        ),  # the first check that met it, though a later one did not
        ([0.5, 0.4, 0.3, 0.2], None, Status.INCOMPLETE, None),
        ([0.5, 0.4, 0.3, 0.1], None, Status.COMPLETE, 16),
        ([0.5, 0.1, 0.9], [1, 1, math.nan], Status.COMPLETE, 8),  # it diverged after its goal
        ([0.5, math.nan], [1, math.nan], Status.INFEASIBLE, None),
        (
            [0.5, 0.1],
            [1, math.nan],
            Status.COMPLETE,
            8,
        ),  # the goal is asked before divergence, which ends it
    ],
)
def test_a_run_goes_on_to_the_budget_or_its_divergence(errors, losses, status, steps):
    run = ended(errors, losses)
    assert (run.status, run.steps_to_result) == (status, steps)
    assert run.result().curve["val_error"] == errors
    assert run.result().steps_run == 4 * len(errors)


def test_without_it_a_run_ends_at_its_goal():
    assert ended([0.5, 0.1], run_on=False).steps_to_result == 8


def test_a_run_that_is_stopped_after_its_goal_is_complete():
    run = ended([0.5, 0.1, 0.3])
    run.failure = "a callback stopped it"
    assert (run.result().status, run.result().steps) == (Status.COMPLETE, 8)
    assert ended([0.5, 0.4]).result().status is Status.STOPPED


def test_a_run_that_begins_anew_still_goes_on():
    run = ended([0.5, 0.1])
    run.restart()
    assert run.train_past_goal and run.record(Validation(4, 0.1, True, 1.0, True)) is None


def trials(rates=(0.02, 0.05, 0.002, 1e4)) -> list[Trial]:
    return [
        Trial(Cell(16, s), i, {**PARAMS, "model.learning_rate": r})
        for i, r in enumerate(rates)
        for s in (0, 0.9)
    ]


@pytest.mark.parametrize(
    "engine", [{"lean": True}, {"lean": False}, {"size": 4}], ids=["one", "trainer", "stack"]
)
def test_k_is_the_same_and_the_curve_goes_on(engine):
    def ordered(**more):
        return sorted(
            train(trials(), WORKLOAD, WHOLE, **engine, **more),
            key=lambda r: (r.trial.point, r.trial.cell),
        )

    found = ordered(train_past_goal=True)
    for there, whole in zip(ordered(), found, strict=True):
        assert (whole.status, whole.steps, whole.kept) == (there.status, there.steps, there.kept)
        assert whole.steps_run == (there.steps_run if whole.status is Status.INFEASIBLE else 60)
        for key, values in there.curve.items():
            until = whole.curve[key][: len(values)]
            assert (
                until == pytest.approx(values, nan_ok=True)
                if "size" in engine
                else str(until) == str(values)
            )
    assert {r.status for r in found} >= {Status.COMPLETE, Status.INFEASIBLE}


def test_both_engines_have_the_same_curve():
    one, other = (
        train(trials(), WORKLOAD, WHOLE, train_past_goal=True, lean=lean) for lean in (True, False)
    )
    assert [str(r.curve) for r in one] == [str(r.curve) for r in other]


@pytest.mark.parametrize("lean", [True, False])
def test_it_goes_on_from_a_checkpoint_after_its_goal(tmp_path, lean):
    study = Study(tmp_path, goal=WHOLE, lean=lean, train_past_goal=True)
    trial = Trial(Cell(100, 0.9), 1, {**PARAMS, "model.learning_rate": 0.05})
    assert train_one(trial, WORKLOAD, WHOLE).steps < 4 * 7
    assert_goes_on(study, trial, (7, 3))


def together() -> dict:
    found = train_one(
        trials()[0], WORKLOAD, {**WHOLE, "max_steps": 40}, train_past_goal=True, lean=False
    )
    return {"status": found.status, "steps": found.steps, "errors": found.curve["val_error"]}


def test_several_ranks_go_on_together():
    alone = together()
    assert same_on_ranks(2, together) == alone
    assert alone["steps"] < 40 == 4 * len(alone["errors"])


def test_any_goal_is_answered_as_if_it_had_been_the_studys(tmp_path):
    cells, storage = [Cell(16, s) for s in (0.0, 0.9)], f"sqlite:///{tmp_path}/study.db"
    found = {
        cell: [
            r
            for r in train(trials(), WORKLOAD, WHOLE, train_past_goal=True)
            if r.trial.cell == cell
        ]
        for cell in cells
    }
    goal, space = Goal(0.3, 4, 60), {key: Range(1e-9, 1e9) for key in PARAMS}
    write_study(storage, found, goal=goal, space=space, train_past_goal=True, race_factor=None)
    record = read_study(storage, "fake")
    assert record.train_past_goal
    ends = set()
    for error in (0.6, 0.3, 0.15, 0.02):
        for cell, there in at_goal(record, error).results.items():
            own = [
                r
                for r in train(trials(), WORKLOAD, {**WHOLE, "error": error}, train_past_goal=True)
                if r.trial.cell == cell
            ]
            assert [(r.status, r.steps, str(r.curve)) for r in there] == [
                (r.status, r.steps, str(decode_columns(encode_columns(r.curve)))) for r in own
            ]
            ends |= {(error, r.status) for r in there}
    assert (0.02, Status.INCOMPLETE) in ends and (0.02, Status.INFEASIBLE) in ends


def made_up(tmp_path, errors: list[float], **kept) -> Analysis:
    curve = {
        "step": [4 * (i + 1) for i in range(len(errors))],
        "val_error": errors,
        "train_loss": [1.0] * len(errors),
    }
    space = {"model.learning_rate": Range(1e-3, 1.0, "log")}
    trial = result(CELL, 0, 8, params={"model.learning_rate": 0.1}, curve=curve, **kept)
    storage = f"sqlite:///{tmp_path}/study.db"
    write_study(
        storage,
        {CELL: [trial]},
        goal=Goal(0.1, 4, 16),
        space=space,
        train_past_goal=True,
        race_factor=None,
    )
    return Analysis(read_study(storage, "fake"))


def test_who_diverged_after_the_goal_misses_harder_goals(tmp_path):
    study = made_up(tmp_path, [0.5, 0.1, 0.3])
    assert protocol_text(study.record) in render(study)
    (missed,) = at_goal(study.record, 0.05).results[CELL]
    assert (missed.status, missed.steps) == (Status.INFEASIBLE, None)


def test_the_theory_and_the_logs_look_at_the_way_to_the_goal(tmp_path):
    from lit_dps.report.figures import logs

    terms = theory_terms(16, lipschitz=(1.0, 3.0, 100.0), squared=(1.0, 1.0, 50.0), at=(4, 8, 12))
    study = made_up(tmp_path, [0.5, 0.1, 0.3, 0.2], **terms)
    found = terms_of(study.cells[0].best)
    assert (found.lipschitz, found.epsilon) == (2.0, 1.0)
    assert logs.rows(study)["step"].tolist() == [4, 8]


def test_readings_at_the_end_of_a_trial_that_ran_past_the_goal_are_not_those_of_k_star(tmp_path):
    for errors, shown in (([0.5, 0.1, 0.3, 0.2], [0, 1]), ([0.5, 0.1], [1, 1])):
        folder = tmp_path / str(len(errors))
        folder.mkdir()
        study = made_up(folder, errors, end_readings={"norm": 2.5})
        assert study.cells[0].best.steps == 8
        tables = (study.table, study.trials)
        assert [table["norm"].notna().sum() for table in tables] == shown
        assert study.trials["norm"].tolist() == [2.5]
        assert ("2.5" in readings_text(study)) == bool(shown[0])
        assert ("ran past the goal" in readings_text(study)) != bool(shown[0])


def setup(goal=None, **study) -> StudySetup:
    config = StudyConfig(space=SPACE, trials=1, batch_sizes=[16], sparsities=[0.5], **study)
    pruning = {"method": "snip", "biases": "paper", "batch_size": 100}
    workload = Workload(MODEL, DATA, {"accelerator": "cpu"})
    return setup_of(
        config, StorageConfig(), workload, {**GOAL, **(goal or {})}, pruning, {"interval": None}
    )


def test_nothing_is_raced_and_every_check_is_full():
    whole = setup({"early_reject": True}, train_past_goal=True)
    assert whole.study.race_factor is None and whole.goal.early_reject is False
    assert (
        setup({"early_reject": True}).goal.early_reject is True and setup().study.race_factor == 2
    )
    with refuses("study.race_factor", 3):
        check(setup(train_past_goal=True, race_factor=3))


def test_further_goals_may_be_harder():
    check(setup(train_past_goal=True, goals=[0.5, 0.1]))
    with refuses("study.goals", 0.1):
        check(setup(goals=[0.1]))


def test_it_is_part_of_the_identity_where_it_is_on(tmp_path):
    plain, whole = setup(), setup(train_past_goal=True)
    assert compare(plain.identity(None), whole.identity(None)) == [
        ("study.train_past_goal", "(absent)", True)
    ]
    assert plain.identity(None) == setup(train_past_goal=False).identity(None)
    url = f"sqlite:///{tmp_path}/study.db"
    for each in (plain, whole):
        study = dataclasses.replace(each.study, name=f"s{each.study.train_past_goal}")
        declare(url, study, "w", each.built_goal, each.identity(None), {})
        check_unchanged(url, study.name, each.identity(None))
    assert [
        study_attributes(open_storage(url), name)["train_past_goal"] for name in ("sFalse", "sTrue")
    ] == [False, True]


def test_a_store_hands_out_runs_that_go_on(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    store = TrialQueue(
        url,
        "s",
        [CELL],
        1,
        SobolSampler(SPACE, 0),
        0,
        AttemptRules(Goal(0.1, 4, 16), train_past_goal=True),
    )
    run = store.claim_next()
    assert run.train_past_goal and run.pause_at == math.inf


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (("train_past_goal=true", "race_factor=2.0"), ("study.race_factor", 2.0)),
        (("train_past_goal=true", "goal.early_reject=true"), ("goal.early_reject", True)),
        (("metrics=[val_loss]", "goal.early_reject=true"), ("goal.early_reject", True)),
        (("train_past_goal=true", "race_factor=null", "goal.early_reject=false"), None),
        (("train_past_goal=true",), None),
        (("race_factor=2.0", "goal.early_reject=true"), None),
    ],
)
def test_what_cuts_curves_short_is_refused_where_it_was_asked_for(asked, refused):
    options = [
        f"--{option}" if option.startswith("goal.") else f"--study.{option}" for option in asked
    ]
    argv = ["--config", str(PLAIN), *options]
    if refused is not None:
        with refuses(*refused):
            read_setup(argv)
        return
    setup = read_setup(argv)
    whole = "train_past_goal=true" in asked
    assert (setup.study.race_factor, setup.goal.early_reject) == (
        (None, False) if whole else (2.0, True)
    )
