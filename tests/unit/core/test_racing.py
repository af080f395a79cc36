"""Racing: where trials stop, what is reported of them, and what is run again under a larger
slack."""

from __future__ import annotations

import itertools
import math

import pytest

from lit_dps.core.attempt import AttemptRules, Validation
from lit_dps.core.goal import Goal
from lit_dps.core.racing import (
    CellCoverage,
    attempt_at_limit,
    default_rungs,
    longest_attempt,
    next_rung,
    race_limit,
    reruns_above,
    results_at_limit,
    truncate_at_race_limit,
)
from lit_dps.core.search_space import Range
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage import trial_queue as store_module
from lit_dps.storage.read import read_study
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.fake_study import result, write_study
from tests.support.runs import trials_of

CELL = Cell(16, 0.0)
INTERVAL, BUDGET = 16, 160


def curve(steps: int) -> dict:
    checks = list(range(INTERVAL, steps + 1, INTERVAL))
    return {"step": checks, "val_error": [0.5] * len(checks), "train_loss": [1.0] * len(checks)}


def trial(
    point: int, steps: int | None, status: str = "complete", run: int | None = None
) -> TrialResult:
    """A trial that completed at `steps`, or ended otherwise after `run`."""
    return result(CELL, point, steps, status, curve=curve(steps or run or BUDGET))


# What every trial would do if nobody stopped it: (status, step of its end)
FATES = [
    ("complete", 96),
    ("incomplete", BUDGET),
    ("complete", 48),
    ("infeasible", 32),
    ("infeasible", 112),
]
FATES += [("complete", 48), ("complete", 64)]


def race(order, slack, stale: int) -> list[TrialResult]:
    """Runs the fates in an order; each sees only the best that was known `stale` trials ago, as
    other workers do."""
    told = []
    for i, point in enumerate(order):
        status, end = FATES[point]
        known = [result.steps for result in told[: max(0, i - stale)]]
        limit = race_limit(known, slack, MINIMUM)
        stop = next((s for s in range(INTERVAL, BUDGET + 1, INTERVAL) if s >= limit), math.inf)
        if stop < end or (stop == end and status == "incomplete" and end < BUDGET):
            told.append(trial(point, None, "outraced", run=stop))
        else:
            told.append(trial(point, end if status == "complete" else None, status, run=end))
    return sorted(told, key=lambda r: r.trial.point)


@pytest.mark.parametrize("slack", [1, 1.3, 2, 3])
def test_reports_do_not_depend_on_who_finished_first(slack):
    seen = {
        tuple(
            (r.status, r.steps, tuple(r.curve["step"]))
            for r in truncate_at_race_limit(race(order, slack, stale), slack, MINIMUM)
        )
        for order in itertools.islice(itertools.permutations(range(len(FATES))), 0, None, 37)
        for stale in (0, 1, 3)
    }
    assert len(seen) == 1


def test_what_is_reported_is_how_it_stood_at_slack_times_the_best():
    full = [
        trial(i, end if status == "complete" else None, status, run=end)
        for i, (status, end) in enumerate(FATES)
    ]
    ended = [(r.status, r.steps) for r in truncate_at_race_limit(full, 1, MINIMUM)]
    outraced = (Status.OUTRACED, None)
    assert ended == [
        outraced,
        outraced,
        (Status.COMPLETE, 48),
        (Status.INFEASIBLE, None),
        outraced,
    ] + [
        (Status.COMPLETE, 48),
        outraced,
    ]
    twice = [(r.status, r.steps) for r in truncate_at_race_limit(full, 2, MINIMUM)]
    assert twice[0] == (Status.COMPLETE, 96), "the limit itself is inside"
    assert twice[1] == twice[4] == outraced
    assert truncate_at_race_limit(full, 1, MINIMUM)[0].curve["step"] == [16, 32, 48]
    assert truncate_at_race_limit(full, None, MINIMUM) == full


def test_without_a_complete_trial_nothing_is_raced():
    full = [trial(0, None), trial(1, None, "infeasible", run=32)]
    assert truncate_at_race_limit(full, 1, MINIMUM) == full
    assert race_limit([None], 1, MINIMUM) == race_limit([48], None, MINIMUM) == math.inf


def test_an_outraced_trial_that_did_not_run_far_enough_is_left_out():
    ended = [trial(0, 48), trial(1, None, "outraced", run=48), trial(2, None, "outraced", run=96)]
    assert [r.trial.point for r in truncate_at_race_limit(ended, 1, MINIMUM)] == [0, 1, 2]
    assert [r.trial.point for r in truncate_at_race_limit(ended, 2, MINIMUM)] == [0, 2]
    assert [r.trial.point for r in truncate_at_race_limit(ended, None, MINIMUM)] == [0]


GOAL = Goal(0.1, INTERVAL, BUDGET)
SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
CELLS = [Cell(16, 0.0), Cell(32, 0.0)]
STEPS = [96, 48, 160, 64]  # of the points, in every cell


def run_study(
    url: str, slack: float | None, cells=CELLS, points: int = 4
) -> list[tuple[Cell, int, int]]:
    """Runs a study of made-up trials under a slack; (cell, point, last step) of every trial that
    was run."""
    s, ran = (
        TrialQueue(url, "s", cells, points, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), slack),
        [],
    )
    for asked in trials_of(s):
        steps, limit = STEPS[asked.point], s.cell_race_limit(asked.cell)
        outraced = steps > limit
        end = math.ceil(limit / INTERVAL) * INTERVAL if outraced else steps  # the first check there
        status = Status.OUTRACED if outraced else Status.COMPLETE
        s.store_result(TrialResult(asked, status, None if outraced else steps, curve(end)))
        ran.append((asked.cell, asked.point, end))
    return ran


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "POLL_SECONDS", -1.0)
    return f"sqlite:///{tmp_path}/study.db"


def test_the_limit_follows_the_best_of_the_cell(url):
    ran = run_study(url, 1)
    assert [(point, end) for cell, point, end in ran if cell == CELLS[0]] == [
        (0, 96),
        (1, 48),
        (2, 48),
        (3, 48),
    ]


def test_points_that_were_good_nearby_run_first(url):
    ran = run_study(url, 1)
    assert [point for cell, point, _ in ran if cell == CELLS[1]] == [1, 0, 2, 3]
    assert [end for cell, _, end in ran if cell == CELLS[1]] == [48, 48, 48, 48]


def test_points_that_were_good_in_a_later_cell_of_an_earlier_run_run_first(url):
    run_study(url, 1, CELLS[1:])
    assert [(cell, point) for cell, point, _ in run_study(url, 1)] == [
        (CELLS[0], point) for point in (1, 0, 2, 3)
    ]


def test_a_larger_slack_runs_again_what_it_needs_and_no_more(url):
    run_study(url, 1, CELLS[:1])
    assert run_study(url, 1, CELLS[:1]) == []
    assert sorted(point for _, point, _ in run_study(url, 1.3, CELLS[:1])) == [2, 3]  # to 62.4
    assert sorted(point for _, point, _ in run_study(url, None, CELLS[:1])) == [2, 3]
    assert run_study(url, 2, CELLS[:1]) == [], "a smaller slack takes nothing away"


def test_of_two_attempts_the_one_that_ran_further_counts(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    short, far = trial(1, None, "outraced", run=48), trial(1, None, "outraced", run=96)
    for i, pair in enumerate(((short, far), (far, short), (short, trial(1, 80)))):
        write_study(url, {CELL: [trial(0, 48), *pair]}, f"s{i}", trials=2, race_factor=1.5)
    ended = [read_study(url, f"s{i}").results[CELL][1] for i in range(3)]
    # A race with the limit 72 stops a trial at its check after 80 steps.
    assert [(r.status, r.steps_run) for r in ended] == [(Status.OUTRACED, 80)] * 3


@pytest.mark.parametrize("failed_at", [16, 64, 128])
@pytest.mark.parametrize("first", ["outraced", "paused"])
def test_a_failure_does_not_hide_an_attempt_that_covers_the_limit(tmp_path, first, failed_at):
    """The attempt ran again for a higher limit, and failed; then another trial lowered the limit.

    The queue hands out nothing below the limit, so the reader must not count a remaining trial.
    """
    url = f"sqlite:///{tmp_path}/study.db"
    attempts = [trial(1, None, first, run=96), trial(1, None, "failed", run=failed_at)]
    header = {"trials": 2, "space": SPACE}
    for name, factor in (("race", 1.0), ("no race", None)):
        write_study(url, {CELL: [trial(0, 48), *attempts]}, name, race_factor=factor, **header)
    (_, covered) = read_study(url, "race").results[CELL]
    assert (covered.status, covered.steps_run) == (Status.OUTRACED, 48)
    queue = TrialQueue(
        url, "race", [CELL], 2, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), 1.0, run_number=1
    )
    assert queue.claim_next() is None
    (_, failed) = read_study(url, "no race").results[CELL]
    assert failed.status is Status.FAILED, "without a limit the earlier attempt is too short"


STOPPED, FAILED = trial(1, None, "outraced", run=96), trial(1, None, "failed", run=64)


@pytest.mark.parametrize(
    ("attempts", "limit", "expected"),
    [
        ([STOPPED, FAILED], 96, STOPPED),
        ([STOPPED, FAILED], 97, FAILED),
        ([STOPPED, FAILED], math.inf, FAILED),
        ([FAILED, STOPPED], 97, STOPPED),
        ([STOPPED, FAILED, trial(1, None, "outraced", run=48)], 97, STOPPED),
        ([trial(1, 48), FAILED], math.inf, trial(1, 48)),
    ],
)
def test_the_attempt_that_counts_for_a_limit(attempts, limit, expected):
    assert attempt_at_limit(attempts, limit) == expected
    assert results_at_limit([trial(0, 48), *attempts], limit) == [trial(0, 48), expected]


@pytest.mark.parametrize("first", ["outraced", "paused"])
def test_an_attempt_that_came_to_its_end_counts_also_at_a_lower_cost(first):
    """A run that begins again, on another machine or in seconds, may need less than before."""
    earlier = trial(1, None, first, run=96)
    for later in (trial(1, 80), trial(1, None, "infeasible", run=32)):
        assert longest_attempt(earlier, later) is later
    assert longest_attempt(earlier, trial(1, None, "outraced", run=80)) is earlier


@pytest.mark.parametrize("factor", [1, 1.25, 1.5, 1.9])
def test_truncated_results_are_known_up_to_the_limit(factor):
    """They are truncated again, when a study resumes and at another goal."""
    results = [trial(0, 48), *(trial(i, None, "outraced", run=96) for i in range(1, 4))]
    once = truncate_at_race_limit(results, factor, MINIMUM)
    assert len(once) == 4
    assert truncate_at_race_limit(once, factor, MINIMUM) == once
    limit = race_limit([48], factor, MINIMUM)
    assert {result.steps_run for result in once[1:]} == {16 * math.ceil(limit / 16)}


def test_a_worker_knows_its_own_results_at_once_and_those_of_others_soon(url, monkeypatch):
    monkeypatch.setattr(store_module, "POLL_SECONDS", 1e9)
    s, other = (
        TrialQueue(url, "s", CELLS[:1], 3, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), 1)
        for _ in range(2)
    )
    mine, theirs = next(asked := trials_of(s)), next(asked_too := trials_of(other))
    assert s.cell_race_limit(CELLS[0]) == other.cell_race_limit(CELLS[0]) == math.inf
    s.store_result(TrialResult(Trial(mine.cell, mine.point), Status.COMPLETE, 48, curve(48)))
    assert (s.cell_race_limit(CELLS[0]), other.cell_race_limit(CELLS[0])) == (48, math.inf)
    monkeypatch.setattr(store_module, "POLL_SECONDS", -1.0)
    assert other.cell_race_limit(CELLS[0]) == 48
    other.store_result(
        TrialResult(Trial(theirs.cell, theirs.point), Status.COMPLETE, 32, curve(32))
    )
    assert s.cell_race_limit(CELLS[0]) == 32
    asked.close(), asked_too.close()


def test_heats_are_a_quarter_of_the_next_and_the_last_is_the_budget():
    assert default_rungs(16, 40_000) == [144, 624, 2496, 10_000, math.inf]
    assert default_rungs(4, 127) == [math.inf]
    assert default_rungs(4, 128) == [32, math.inf]
    assert sum(default_rungs(16, 40_000)[:-1]) < 40_000 / 3, (
        "what a cell without any complete trial costs more"
    )


def run_in_heats(
    url: str, ends: dict[int, int | None], slack: float = 1, budget: int = 1024
) -> list[tuple[int, int]]:
    """Runs a cell whose points end at given steps, or never; (point, last step) of every run, in
    order."""
    levels = [32, 128, math.inf]
    goal = Goal(0.1, 16, budget)
    s, ran = (
        TrialQueue(
            url,
            "s",
            CELLS[:1],
            len(ends),
            SobolSampler(SPACE, 5),
            5,
            AttemptRules(goal),
            slack,
            levels,
        ),
        [],
    )
    while (run := s.claim_next()) is not None:
        point = run.trial.point
        while run.status is None:
            step = len(run.curve["step"]) * 16 + 16
            run.record(Validation(step, 0.1 if step == ends[point] else 0.9, True, 1.0, True))
        s.store_result(run.result())
        ran.append((point, step))
    return ran


def test_nobody_spends_the_budget_before_a_good_trial_begins(url):
    ran = run_in_heats(url, {0: None, 1: None, 2: 96, 3: 80})
    assert ran == [(0, 32), (1, 32), (2, 32), (3, 32), (0, 128), (1, 128), (2, 96), (3, 80)]
    s = TrialQueue(url, "s", CELLS[:1], 4, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), 1)
    assert next(trials_of(s), None) is None, "all ran at least as long as the best"


def test_who_paused_before_the_limit_is_run_to_it(url):
    ran = run_in_heats(url, {0: None, 1: 32, 2: 48}, slack=2)
    assert ran == [(0, 32), (1, 32), (2, 48), (0, 64)]


def test_a_cell_that_nobody_completes_spends_the_budget(url):
    assert run_in_heats(url, {0: None, 1: None}) == [
        (p, step) for step in (32, 128, 1024) for p in (0, 1)
    ]


def test_without_racing_nobody_pauses(url):
    assert run_in_heats(url, {0: None, 1: 96}, slack=None) == [(0, 1024), (1, 96)]


def test_workers_who_come_later_pause_too(url):
    def new_queue() -> TrialQueue:
        rungs = [32, 128, math.inf]
        return TrialQueue(
            url, "s", CELLS[:1], 4, SobolSampler(SPACE, 5), 5, AttemptRules(GOAL), 1, rungs
        )

    monitor = [new_queue() for _ in range(2)]
    claims = [s.claim_next() for s in monitor]
    assert [run.pause_at for run in claims] == [32, 32], "the second found all points enqueued"
    for s, run in zip(monitor, claims, strict=True):
        s.store_result(TrialResult(run.trial, Status.PAUSED, None, curve(32)))
    again = new_queue()
    points = []
    while (run := again.claim_next()) is not None and len(points) < 5:
        points.append((run.trial.point, run.pause_at))
        status = Status.PAUSED if run.pause_at < math.inf else Status.INCOMPLETE
        again.store_result(TrialResult(run.trial, status, None, curve(int(min(run.pause_at, 512)))))
    rest = [p for p in (2, 3)]
    assert [rung for point, rung in points if point in rest][:2] == [32, 32]
    assert (claims[0].trial.point, 128) in points, (
        "who paused is run four times as far, by whoever is there"
    )


RUNGS = [32, 128, math.inf]


@pytest.mark.parametrize(
    "steps, taken, rungs, expected",
    [
        ({}, set(), RUNGS, ([0, 1, 2, 3], False)),
        ({0: 32, 1: math.inf}, {2}, RUNGS, ([3], False)),
        ({0: 32, 1: math.inf, 3: 48}, {2}, RUNGS, ([0, 3], False)),
        ({0: -math.inf, 1: 127, 2: 128, 3: 300}, set(), RUNGS, ([0], False)),
        ({0: 128, 1: math.inf, 2: 127, 3: 300}, set(), RUNGS, ([2], False)),
        ({0: 128, 1: math.inf, 2: 500, 3: 300}, set(), RUNGS, ([0, 2, 3], True)),
        ({0: math.inf, 1: math.inf, 2: math.inf}, {3}, RUNGS, ([], True)),
        ({0: math.inf, 1: 500}, set(), [math.inf], ([1, 2, 3], True)),
        ({}, {0, 1, 2, 3}, RUNGS, ([], True)),
    ],
)
def test_points_short_of_the_lowest_open_rung(steps, taken, rungs, expected):
    coverage = CellCoverage(taken, {}, steps)
    assert coverage.points_short_of_rung(4, rungs) == expected


def test_points_short_of_a_limit_by_their_costs():
    coverage = CellCoverage({3})
    coverage.add(0, cost=640.0, step=32)
    coverage.add(1, cost=64.0, step=500)
    coverage.add(1, cost=-math.inf, step=-math.inf)
    coverage.add(2, cost=64.0, step=32)
    coverage.add(2, cost=math.inf, step=math.inf)
    coverage.add(5, cost=0.0, step=0)
    assert coverage.points_short_of_limit(5, 64.0) == [4]
    assert coverage.points_short_of_limit(5, 65.0) == [1, 4]
    assert coverage.points_short_of_limit(6, 641.0) == [0, 1, 4, 5]
    assert coverage.points_short_of_limit(1, 641.0) == [0], "points beyond the first are not asked"
    assert coverage.points_short_of_rung(5, RUNGS) == ([4], False)
    assert coverage.reruns_above_step == {0: 32, 1: 500, 2: math.inf, 5: 0}


def test_attempts_that_paused_or_were_outraced_run_again():
    for status in Status:
        expected = math.inf
        if status in (Status.OUTRACED, Status.PAUSED):
            expected = 48
        assert reruns_above(status, 48) == expected


def test_next_rung():
    steps = [-math.inf, 0, 31, 32, 128, 10**9, math.inf]
    assert [next_rung(step, RUNGS) for step in steps] == [32, 32, 32, 128, *[math.inf] * 3]
