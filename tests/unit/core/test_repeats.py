"""Repeats of the best points on fresh seeds: which, when, how far, and what they say."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.merge import lines
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.goal import Goal
from lit_dps.core.repeats import RepeatPlan, missing_repeats, truncate_repeats
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.report.repeats import equal_repeats
from lit_dps.report.screen import screen
from lit_dps.report.text import render, table_and_law
from lit_dps.storage.database import open_storage
from lit_dps.storage.header import declare
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.stored_format import study_attributes
from lit_dps.storage.take_over import claim_report
from lit_dps.storage.trial_queue import TrialQueue
from lit_dps.study.progress import Progress, ProgressLog, RunPlan
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, result
from tests.support.runs import trials_of
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401
from tests.unit.storage.test_merge import merged
from tests.unit.storage.test_store import SPACE
from tests.unit.study.test_grid import setup

A, B = Cell(4), Cell(8)
GOAL = Goal(0.1, check_interval=16, max_steps=960)
STEPS = {(A, 0): 160, (A, 1): 96, (A, 2): None, (B, 0): 48, (B, 1): 48, (B, 2): 80}
PLAN = RepeatPlan(2)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


def store(url: str, plan: RepeatPlan = PLAN, points: int = 3, cells=(A, B), **kw) -> TrialQueue:
    return TrialQueue(
        url,
        "s",
        list(cells),
        points,
        SobolSampler(SPACE, 5),
        5,
        AttemptRules(GOAL),
        repeat_plan=plan,
        **kw,
    )


def ended(
    trial: Trial, steps: int | None, status: Status = Status.INCOMPLETE, ran: int = 960
) -> TrialResult:
    curve = {"step": [steps or ran], "val_error": [0.1 if steps else 0.5], "train_loss": [1.0]}
    return TrialResult(
        trial, status if steps is None else Status.COMPLETE, steps, curve, seconds=1.0
    )


def search(s: TrialQueue, steps=STEPS) -> list[Trial]:
    """Runs the search; returns the repeats, which are run too and take twice as many steps as their
    point did."""
    repeats = []
    for trial in trials_of(s):
        if trial.repeat:
            repeats.append(trial)
        s.store_result(
            ended(
                trial,
                2 * steps[trial.cell, trial.point]
                if trial.repeat
                else steps[trial.cell, trial.point],
            )
        )
    return repeats


def which(trials) -> list[tuple]:
    return [(t.cell, t.point, t.repeat) for t in trials]


def test_which_repeats_are_left():
    plan = RepeatPlan(2, points=2, slack=3)
    complete = [(160, 0), (96, 5), (160, 4)]
    assert plan.best_points(complete, MINIMUM) == [5, 0]
    assert plan.missing(complete, {}, MINIMUM) == [(5, 1), (0, 1), (5, 2), (0, 2)]
    assert plan.missing(complete, {(5, 1): math.inf, (0, 1): 287, (0, 2): 288}, MINIMUM) == [
        (0, 1),
        (5, 2),
    ]
    to_budget = dataclasses.replace(plan, slack=None)
    assert to_budget.missing(complete, {(5, 1): math.inf, (0, 1): 900}, MINIMUM)[0] == (0, 1)
    assert plan.missing([], {}, MINIMUM) == [] == RepeatPlan().missing(complete, {}, MINIMUM)


def test_a_failed_repeat_is_left_and_one_that_missed_is_not():
    best, plan = [result(A, 0, 96)], RepeatPlan(1, slack=2)
    for repeat, left in (
        (ended(Trial(A, 0, repeat=1), None, Status.FAILED), 1),
        (ended(Trial(A, 0, repeat=1), None, Status.OUTRACED, ran=96), 1),
        (ended(Trial(A, 0, repeat=1), None, Status.OUTRACED, ran=192), 0),
        (ended(Trial(A, 0, repeat=1), None, Status.INFEASIBLE, ran=16), 0),
        (ended(Trial(A, 0, repeat=1), None), 0),
    ):
        assert len(missing_repeats(plan, best, [repeat], MINIMUM)) == left, repeat.status


def repeat_of(number: int, steps: int | None, status=Status.INCOMPLETE, ran: int = 960):
    """A repeat of point 0 with a check every 16 steps."""
    given = ended(Trial(A, 0, repeat=number), steps, status, ran)
    checks = list(range(16, (steps or ran) + 1, 16))
    curve = {"step": checks, "val_error": [0.5] * len(checks), "train_loss": [1.0] * len(checks)}
    return dataclasses.replace(given, curve=curve)


def test_repeats_beyond_a_limit_that_fell_count_as_stopped_there():
    """The repeats ran to 3 * 160 steps before a new trial lowered K* to 96."""
    plan = RepeatPlan(4, slack=3)
    results = [result(A, 0, 160), result(A, 1, 96)]
    repeats = [
        repeat_of(1, 288),
        repeat_of(2, 304),
        repeat_of(3, None, Status.OUTRACED, 480),
        repeat_of(4, None, Status.FAILED, 160),
    ]
    attempts = [*repeats[:3], repeat_of(4, None, Status.OUTRACED, 288), repeats[3]]
    truncated = truncate_repeats(plan, results, attempts, MINIMUM)
    assert [(r.status, r.steps, r.steps_run) for r in truncated] == [
        (Status.COMPLETE, 288, 288),
        (Status.OUTRACED, None, 288),
        (Status.OUTRACED, None, 288),
        (Status.OUTRACED, None, 288),
    ]
    assert truncate_repeats(plan, results[:1], attempts, MINIMUM) == repeats
    assert truncate_repeats(plan, [], attempts, MINIMUM) == repeats, "without a K*"


def test_the_repeats_of_a_stored_study_end_at_the_limit_of_the_last_k_star(url):
    declare(url, config(repeats=1, batch_sizes=[4]), "w", GOAL, {}, {})
    plan = RepeatPlan(1, slack=8.0)
    first = store(url, plan, points=1, cells=[A])
    for trial in trials_of(first):
        first.store_result(repeat_of(1, 800) if trial.repeat else ended(trial, 160))
    assert [r.steps for r in read_study(url, "s").repeats[A]] == [800]
    later = store(url, plan, cells=[A])
    for trial in trials_of(later):
        if not trial.repeat:
            later.store_result(ended(trial, 96))
    (repeat,) = read_study(url, "s").repeats[A]
    assert (repeat.status, repeat.steps, repeat.steps_run) == (Status.OUTRACED, None, 768)
    (raw,) = read_study(url, "s", truncates=False).repeats[A]
    assert raw.steps == 800


def test_the_best_points_are_repeated_after_the_search(url):
    repeats = search(s := store(url))
    assert which(repeats) == [(A, 1, 1), (A, 1, 2), (B, 0, 1), (B, 0, 2)]
    params = {
        t.cell: t.params for t in trials_of(store(f"{url}.2", RepeatPlan(), 2)) if t.point == 1
    }
    assert repeats[0].params == params[A], "metaparameters are the point's"
    assert s.claim_next() is None


def test_a_repeat_runs_to_its_multiple_of_the_best_and_no_race_ends_it(url):
    s = store(url, RepeatPlan(2, slack=3), cells=[A], race_factor=1)
    for trial in (run.trial for run in iter(s.claim_next, None) if not run.trial.repeat):
        s.store_result(ended(trial, STEPS[A, trial.point], Status.OUTRACED, ran=160))
        if trial.point == 2:
            break
    one, two = s.claim_next(), s.claim_next()
    assert (one.trial.repeat, two.trial.repeat) == (
        1,
        2,
    ) and one.read_race_limit() == 288 == s.trial_race_limit(one.trial)
    s.store_result(ended(one.trial, 16))
    assert two.read_race_limit() == 288 and s.cell_race_limit(A) == 96, (
        "the goal met sooner changes neither K* nor the other repeat"
    )
    s.store_result(ended(two.trial, None, Status.OUTRACED, ran=288))
    assert s.claim_next() is None
    later = store(url, RepeatPlan(2, slack=4), cells=[A], race_factor=1)
    assert which([later.claim_next().trial]) == [(A, 1, 2)], "a longer one goes on"


def test_a_cell_waits_for_whoever_still_searches_it(url):
    one, two = store(url), store(url)
    last = [one.claim_next().trial for _ in STEPS][-1]
    for trial in [Trial(cell, point) for cell, point in STEPS][:-1]:
        one.store_result(ended(trial, STEPS[trial.cell, trial.point]))
    got = [two.claim_next().trial for _ in range(2)]
    assert which(got) == [(A, 1, 1), (A, 1, 2)] and two.claim_next() is None, (
        "K* of the other may change"
    )
    one.store_result(ended(last, 16))
    assert which(trials_of(one)) == [(B, 2, 1), (B, 2, 2)]


def test_a_new_best_point_is_repeated_and_the_old_repeats_are_kept(url):
    steps = STEPS | {(A, 3): 32, (B, 3): None}
    declare(url, config(repeats=2, trials=4), "w", GOAL, {}, {})
    search(store(url))
    assert which(search(store(url, points=4), steps)) == [(A, 3, 1), (A, 3, 2)]
    found = Analysis(read_study(url, "s"))
    assert [(each.cell, each.point, each.costs_over_seeds) for each in found.repeats] == [
        (A, 3, [64, 64]),
        (B, 0, [96, 96]),
    ]


def config(**kw):
    from lit_dps.core.config import StudyConfig

    return StudyConfig(
        **{"name": "s", "batch_sizes": [4, 8], "sparsities": [0.0], "trials": 3, "space": SPACE}
        | kw
    )


def test_a_study_of_before_is_extended_by_repeats(url):
    was = config()
    declare(url, was, "w", GOAL, {"a": 1}, {})
    search(store(url, RepeatPlan()))
    assert study_attributes(open_storage(url), "s")["repeats"]["count"] == 0
    before = table_and_law(Analysis(read_study(url, "s")))
    declare(url, config(repeats=2), "w", GOAL, {"a": 1}, {})
    search(store(url))
    record = read_study(url, "s")
    assert render(Analysis(record)).startswith(before.rstrip("\n")), "what the search found stays"
    assert record.plan == RepeatPlan(2) and [len(r) for r in record.results.values()] == [3, 3]
    declare(url, was, "w", GOAL, {"a": 1}, {})
    assert read_study(url, "s").plan == RepeatPlan(2), "never taken away"
    assert claim_report(url, "s") is None


def test_medians_spread_and_bias_are_those_of_the_repeats(url):
    declare(url, config(repeats=5, batch_sizes=[4]), "w", GOAL, {}, {})
    s, found = store(url, RepeatPlan(5), cells=[A]), iter([128, 192, None, 96, 160])
    for trial in trials_of(s):
        steps = next(found) if trial.repeat else STEPS[A, trial.point]
        read = {"norm": float(steps or 0)}
        along = {"drift": {"step": [16], "moved": [float(trial.repeat)]}}
        one = dataclasses.replace(ended(trial, steps), end_readings=read, readings=along)
        s.store_result(one)
    study = Analysis(read_study(url, "s"))
    (each,) = study.repeats
    assert (each.searched_cost, each.missed, each.median) == (96, 1, 160)
    assert [each.quantile(q) for q in (0, 0.25, 0.75, 0.9, 1)] == [96, 128, 192, math.inf, math.inf]
    assert each.bias == pytest.approx(96 / 160)
    row = study.repeat_table.iloc[0]
    assert (row["least"], row["upper"], row["missed"], row["floor"]) == (96, 192, 1, 0)
    assert (row["norm_median"], row["moved_median"]) == (128, 3)
    text = screen(study, ["readings"])
    medians = text.split("readings of the repeats")[1].splitlines()
    assert medians[1].split() == ["B", "S", "sample", "repeats", "moved", "norm"]
    assert medians[2].split() == ["4", "0", "1", "5", "3", "128"]
    curves = study.trial_curves
    moved = curves.dropna(subset="moved")[["point", "repeat", "step", "moved"]]
    assert moved.to_numpy().tolist()[:3] == [[point, 0, 16, 0] for point in range(3)]
    assert moved.to_numpy().tolist()[3:] == [[1, repeat, 16, repeat] for repeat in range(1, 6)]
    expected = ["4", "0", "96", "160", "128", "to", "192", "96", "to", "missed", "5", "1", "0.60"]
    assert expected in [line.split() for line in render(study).splitlines()]


def test_a_median_at_the_first_check_that_the_rule_can_meet_is_a_bound(url):
    goal = dataclasses.replace(GOAL, rule="mean_of_checks", options={"checks": 3})
    first = 3 * goal.check_interval
    declare(url, config(repeats=2, batch_sizes=[4]), "w", GOAL, {}, {})
    s = store(url, cells=[A])
    for trial in trials_of(s):
        s.store_result(ended(trial, first))
    study = Analysis(dataclasses.replace(read_study(url, "s"), goal=goal))
    assert study.table["floor"].tolist() == study.repeat_table["floor"].tolist() == [1]
    row = ["<=", str(first)]
    assert render(study).split("K / median")[1].split()[2:10] == [*row, *row, *row, "to", "<="]


def test_a_median_at_the_first_check_is_a_bound(url):
    declare(url, config(repeats=2, batch_sizes=[4]), "w", GOAL, {}, {})
    s = store(url, cells=[A])
    for trial in trials_of(s):
        s.store_result(ended(trial, 16))
    study = Analysis(read_study(url, "s"))
    assert study.repeats[0].bias is None and study.repeat_table["floor"].tolist() == [1]
    expected = [
        "4",
        "0",
        "<=",
        "16",
        "<=",
        "16",
        "<=",
        "16",
        "to",
        "<=",
        "16",
        "<=",
        "16",
        "to",
        "<=",
        "16",
        "2",
        "0",
        "-",
    ]
    assert expected in [line.split() for line in render(study).splitlines()]


def test_merge_takes_repeats_over_and_tells_conflicts(tmp_path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("one", "two")]
    for url, count in zip(urls, (1, 2), strict=True):
        declare(url, config(repeats=count), "w", GOAL, {}, {})
        s = store(url, RepeatPlan(count))
        for trial in trials_of(s):
            steps = STEPS[trial.cell, trial.point]
            other = url == urls[1] and trial.cell == B and trial.repeat == 1
            s.store_result(
                ended(trial, 3 * steps if other else 2 * steps if trial.repeat else steps)
            )
    found = merged(*urls)["s"]
    assert (found.added, found.unchanged) == (2, 7)
    assert "sample 0 repeat 1 " in lines("s", found)[1]
    record = read_study(urls[0], "s")
    assert record.plan.count == 2 and [
        [r.steps for r in record.repeats[cell]] for cell in (A, B)
    ] == [
        [192] * 2,
        [96] * 2,
    ]


@pytest.mark.parametrize(("losses", "noted"), [((1.0, 1.0), True), ((1.0, 0.9), False)])
def test_repeats_that_are_the_same_as_the_search_do_not_tell_the_spread(losses, noted):
    def of(repeat, loss):
        curve = {"step": [16, 96], "val_error": [0.5, 0.1], "train_loss": [2.0, loss]}
        return dataclasses.replace(ended(Trial(A, 0, PARAMS, repeat=repeat), 96), curve=curve)

    record = analysis_of({A: [of(0, 1.0)]}).record
    record = dataclasses.replace(
        record, plan=PLAN, repeats={A: [of(1, losses[0]), of(2, losses[1])]}
    )
    values = [*equal_repeats(Analysis(record))]
    assert values == ([{"equal": 1, "started": 1}] if noted else [])


def test_repeats_are_no_part_of_the_identity():
    grid = {"batch_sizes": [16], "sparsities": [0.5]}
    asked = {"repeats": 5, "repeat_points": 2, "repeat_slack": None}
    assert setup({}, **grid).identity(None) == setup({}, **grid, **asked).identity(None)


def test_progress_counts_repeats():
    progress = ProgressLog(Progress(RunPlan(dict.fromkeys([A], 400), 1, repeats=RepeatPlan(2))))
    assert "repeats 0/2" in progress.line()
    progress.update(ended(Trial(A, 0), 96))
    progress.update(ended(Trial(A, 0, repeat=1), 96))
    assert progress.line().startswith("cells 1/1  trials 1/1  repeats 1/2  ")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("repeats", "study.repeats", -1),
        ("repeat_points", "study.repeat_points", 0),
        ("repeat_slack", "study.repeat_slack", 0.5),
    ],
)
def test_what_is_not_allowed_is_refused(name, key, value):
    with refuses(key, value):
        config(**{name: value}).check()
