"""A study in which no trial reaches the goal: best values, diverged trials, what to change, the
exit code."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.statistic import median_of_best
from lit_dps.core.trial import Cell, Series, Status
from lit_dps.report.answer import recommendation, recommendation_sentences
from lit_dps.report.no_result import (
    advice,
    best_validation,
    ended_without_result,
    have_diverged,
    have_failed,
    have_no_k_star,
    is_without_k_star,
    missed_text,
    no_result_lines,
    spent_budgets,
)
from lit_dps.report.result_table import marks
from lit_dps.report.screen import screen
from lit_dps.report.warnings import (
    diverged_cells,
    failed_cells,
    missing_k_star,
    no_k_star,
    pending_trials,
    study_notes,
    undetermined_trials,
)
from tests.support.texts import numbers_in
from tests.unit.analysis.test_answer import GOAL, record, trial

STEPS = [100, 200, 300, 400]


def missed(batch, point, values, status=Status.INCOMPLETE, exact=None, rate=0.1):
    """A trial with these values of the validation error at its checks."""
    result = trial(batch, point, None, 1.0, status, rate=rate)
    curve = {
        "step": STEPS[: len(values)],
        "val_error": list(values),
        "train_loss": [1.0] * len(values),
    }
    if exact is not None:
        curve["exact"] = list(exact)
    object.__setattr__(result, "curve", curve)
    return result


def study(*trials):
    """A study at B = 4, each of whose three trials a cell ended."""
    return record({4: list(trials)})


def said(found):
    return screen(Analysis(found), width=1000)


def test_the_best_value_of_each_cell_and_the_diverged_trials_are_reported():
    found = record(
        {
            4: [
                missed(4, 0, [0.5, 0.3, 0.25, 0.26]),
                missed(4, 1, [0.6]),
                missed(4, 2, [math.nan], Status.INFEASIBLE),
            ],
            8: [missed(8, i, [0.4, 0.35, 0.3, 0.21]) for i in range(3)],
        }
    )
    lines = said(found).splitlines()
    assert numbers_in(lines[0]) == [0.1, 400]
    assert lines[4].startswith(f"study {found.name}, ")
    assert lines[6].split() == ["4", "0", "0.25", "at", "step", "300", "2", "1"]
    assert lines[7].split() == ["8", "0", "0.21", "at", "step", "400", "3", "0"]
    diverged, improving = advice(found, Analysis(found).cells)
    assert numbers_in(diverged) == [1, 6]
    assert numbers_in(improving)[-2:] == [400, 400] and "goal.max_steps" in improving
    assert f"{diverged}\n{improving}\n" in said(found)


def test_a_trial_that_stopped_improving_asks_for_an_easier_goal():
    found = study(*(missed(4, i, [0.3, 0.2, 0.25, 0.26]) for i in range(3)))
    (line,) = advice(found, Analysis(found).cells)
    assert numbers_in(line)[-4:] == [200, 400, 0.1, 0.2]


def test_a_goal_in_percent_of_a_metric_that_is_a_share_asks_for_the_share():
    trials = [missed(4, i, [0.7, 0.8, 0.75, 0.74]) for i in range(3)]
    for result in trials:
        result.curve["val_acc"] = result.curve.pop("val_error")
    found = dataclasses.replace(study(*trials), goal=Goal(98.0, 100, 400, "val_acc", at_least=True))
    (line,) = advice(found, Analysis(found).cells)
    assert numbers_in(line) == [0.8, 98, 1, 0.98]


def test_diverged_everywhere_names_the_range():
    found = study(*(missed(4, i, [math.nan], Status.INFEASIBLE) for i in range(3)))
    (line,) = advice(found, Analysis(found).cells)
    assert numbers_in(line) == [3, 0.001] and "learning_rate" in line


def test_a_best_trial_at_the_end_of_a_range_asks_for_a_wider_one():
    found = study(*(missed(4, i, [0.3, 0.2, 0.2, 0.15], rate=9.9) for i in range(3)))
    edge = advice(found, Analysis(found).cells)[0]
    assert "learning_rate high" in edge and "--extend-space" in edge


@pytest.mark.parametrize(
    ("at_least", "expected"), [(False, (0.2, 100, False)), (True, (0.4, 300, False))]
)
def test_bounds_of_checks_that_stopped_early_are_named(at_least, expected):
    goal = Goal(0.1, 100, 400, "val_error", at_least)
    best = best_validation(goal, [missed(4, 0, [0.2, 0.3, 0.4], exact=[0, 0, 0])])
    assert (best.value, best.step, best.exact) == expected
    assert best.text(goal).startswith("below " if at_least else "above ")
    mixed = best_validation(goal, [missed(4, 0, [0.2, 0.3, 0.4], exact=[0, 1, 0])])
    assert (mixed.value, mixed.exact) == (0.3, True)


def test_only_a_study_whose_trials_ended_has_no_result():
    without = study(*(missed(4, i, [0.3]) for i in range(3)))
    assert ended_without_result(Analysis(without).cells)
    assert not ended_without_result(
        Analysis(study(missed(4, 0, [0.3]))).cells
    )  # two trials are pending
    with_k_star = study(trial(4, 0, 100, 1.0), *(missed(4, i, [0.3]) for i in (1, 2)))
    assert not ended_without_result(Analysis(with_k_star).cells)
    failed = study(*(missed(4, i, [], Status.FAILED) for i in range(3)))
    assert not ended_without_result(Analysis(failed).cells)
    begun = Analysis(study(missed(4, 0, [0.3])))
    assert is_without_k_star(begun.cells)
    assert "so far" in no_result_lines(begun.record, begun.cells)[0]
    assert not is_without_k_star(Analysis(with_k_star).cells)


def test_a_single_cell_without_k_star_says_what_it_reached():
    found = record({4: [trial(4, 0, 100, 1.0)], 8: [missed(8, i, [0.4, 0.2]) for i in range(3)]})
    cells = Analysis(found).cells
    reached = missed_text(found.goal, cells[1])
    assert reached.startswith(f"{Cell(8)}: ") and numbers_in(reached) == [0.2, 200]
    missing = study_notes(Analysis(found))[0]
    assert numbers_in(missing)[:2] == [1, 2] and reached in missing


def at_further_goal(*cells):
    """A study at B = 4, 8, ... whose goal of 0.1 is raised to 0.3."""
    return Analysis(record({4 * 2**i: list(trials) for i, trials in enumerate(cells)})).at_goal(0.3)


def test_a_further_goal_that_undetermined_trials_may_have_met_is_unknown():
    """A validation of 0.2 that stopped early is a bound: its true value may miss 0.3."""
    undetermined = [missed(8, i, [0.2, 0.2], exact=[0, 0]) for i in range(3)]
    mixed = [missed(4, i, [math.nan], Status.INFEASIBLE) for i in range(2)]
    mixed.append(missed(4, 2, [0.2], exact=[0]))
    study = at_further_goal(mixed, undetermined)
    assert not have_no_k_star(study.cells) and not is_without_k_star(study.cells)
    assert not any(have_diverged(cell) or have_failed(cell) for cell in study.cells)
    assert recommendation(study, Series()).startswith("No recommendation. It is unknown which")
    assert [marks(study, cell) for cell in study.cells] == [["unknown"], ["unknown"]]
    for note in (no_k_star, missing_k_star, diverged_cells, failed_cells, pending_trials):
        assert [*note(study)] == []
    (note,) = undetermined_trials(study)
    assert (note["count"], note["declared"]) == (4, 6)
    text = screen(study)
    assert "diverged" not in text and "No trial" not in text and "max_steps" not in text


def test_a_cell_that_surely_missed_a_further_goal_is_named_beside_unknown_cells():
    undetermined = [missed(4, i, [0.2], exact=[0]) for i in range(3)]
    missing = [missed(8, i, [0.5, 0.4]) for i in range(3)]
    diverged = [missed(16, i, [math.nan], Status.INFEASIBLE) for i in range(3)]
    study = at_further_goal(undetermined, missing, diverged)
    (note,) = missing_k_star(study)
    assert (note["count"], note["cells"]) == (1, 3) and "B=8" in str(note["best"])
    (note,) = diverged_cells(study)
    assert (note["count"], note["names"]) == (1, str(Cell(16)))
    assert [marks(study, cell) for cell in study.cells] == [
        ["unknown"],
        ["goal not reached"],
        ["diverged"],
    ]


@pytest.mark.parametrize(("undetermined", "may_have"), [(1, False), (2, False), (3, True)])
def test_too_few_undetermined_trials_cannot_give_a_k_star(undetermined, may_have):
    """The median of the best 5 needs three complete trials."""
    trials = [missed(4, i, [0.2], exact=[0]) for i in range(undetermined)]
    trials += [missed(4, i, [0.5]) for i in range(undetermined, 3)]
    found = dataclasses.replace(record({4: trials}), statistic=median_of_best(5))
    (cell,) = Analysis(found).at_goal(0.3).cells
    assert len(cell.undetermined_points) == undetermined and cell.k_star is None
    assert cell.may_have_k_star == may_have
    assert have_no_k_star([cell]) != may_have


def test_an_unknown_cell_may_have_a_k_star_beside_the_only_known_one():
    known = [trial(4, i, 100, 1.0) for i in range(3)]
    for result in known:
        result.curve["val_error"][-1] = 0.05
    undetermined = [missed(8, i, [0.2], exact=[0]) for i in range(3)]
    study = at_further_goal(known, undetermined)
    sentences = recommendation_sentences(study, Series())
    assert any("may have a K*" in sentence for sentence in sentences)
    assert not any("No other batch size" in sentence for sentence in sentences)


def test_the_budget_that_ended_the_trials_is_the_one_to_raise():
    goal = Goal(0.1, 100, 40_000, max_examples=1600, max_seconds=60.0)
    found = {4: [trial(4, i, 100, 1.0) for i in range(3)]}
    for batch_size, seconds in ((8, 10.0), (16, 15.0)):
        found[batch_size] = [missed(batch_size, i, [0.5, 0.4, 0.3, 0.2]) for i in range(3)]
        for result in found[batch_size]:
            result.curve["examples"] = [batch_size * step for step in STEPS]
            result.curve["seconds"] = [seconds * i for i in (1, 2, 3, 4)]
    # At step 400: 3,200 examples in 40 s at B = 8, and 6,400 in 60 s at B = 16.
    assert spent_budgets(goal, found[8]) == {"goal.max_examples": 1600}
    assert spent_budgets(goal, found[16]) == {"goal.max_examples": 1600, "goal.max_seconds": 60}
    assert spent_budgets(GOAL, found[8]) == {"goal.max_steps": 400}
    study = Analysis(dataclasses.replace(record(found), goal=goal))
    (note,) = missing_k_star(study)
    assert note["budgets"] == "goal.max_examples and goal.max_seconds"
    without = dataclasses.replace(record({8: found[8]}), goal=goal)
    (line,) = advice(without, Analysis(without).cells)
    assert numbers_in(line)[-2:] == [200, 1600] and "goal.max_steps" not in line


def test_a_trial_that_its_module_ended_has_spent_no_budget():
    stopped = []
    for i in range(3):
        result = missed(8, i, [0.5, 0.4, 0.3, 0.2])
        stopped.append(dataclasses.replace(result, status=Status.STOPPED))
    found = record({8: stopped})
    lines = advice(found, Analysis(found).cells)
    assert 400 in numbers_in(lines[-1]) and "goal.max_steps" not in lines[-1]
