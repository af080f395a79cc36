"""`analyze --scale`: K at a larger size, of the cells of a study."""

from __future__ import annotations

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.scale_up import runs_of_axis
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Series
from lit_dps.report.scale_up import Scale, scale_of, scale_up_text
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, result
from tests.unit.analysis.test_scale_up import BATCH_SIZES, SIZES, k_of

AXIS = "data.train_examples"


def study(sizes=SIZES, sparsities=(0.0,), missed=()) -> Analysis:
    """A study whose K follow the law, apart from cells that missed the goal."""
    results = {}
    for size in sizes:
        for batch_size in BATCH_SIZES:
            for sparsity in sparsities:
                cell = Cell(batch_size, sparsity, ((AXIS, size),))
                steps = round(float(k_of(size, batch_size)))
                results[cell] = [result(cell, 0, steps)]
                if (size, batch_size) in missed:
                    results[cell] = [result(cell, 0, None, "incomplete")]
    goal = Goal(0.1, check_interval=1, max_steps=100_000)
    return analysis_of(results, goal=goal, axes={AXIS: list(sizes)})


def test_the_text_has_k_at_the_larger_size():
    lines = scale_up_text(study(), f"{AXIS}=10x").splitlines()
    assert lines[0].startswith(f"scaled to {AXIS} = 400000: B_crit grows with the power 0.5")
    assert lines[1].startswith("  B_crit there is ")
    for line, batch_size in zip(lines[2:6], BATCH_SIZES, strict=True):
        name, steps = line.split(": ")
        assert name == f"  B = {batch_size}"
        assert float(steps.split()[0]) == pytest.approx(float(k_of(4e5, batch_size)), rel=0.06)
    assert scale_up_text(study(), f"{AXIS}=400000").splitlines() == lines


def test_cells_that_missed_the_goal_are_lower_bounds():
    runs = runs_of_axis(study(missed=[(1e4, 16)]).laws, AXIS)
    assert len(runs) == 12
    (bound,) = runs[runs["censored"] == 1].to_dict("records")
    assert (bound["size"], bound["batch_size"], bound["steps"]) == (1e4, 16, 100_000)


def test_sizes_are_factors_or_values():
    assert scale_of("model.width=512") == Scale("model.width", 512, False)
    assert scale_of("data.n = 2.5x") == Scale("data.n", 2.5, True)
    for option in ("data.n", "=3x", "data.n=x", "data.n=-1", "data.n=0x", "data.n=infx"):
        with refuses("--scale", option):
            scale_of(option)


def test_what_cannot_be_scaled_is_refused():
    with refuses("size", 4e6):
        scale_up_text(study(), f"{AXIS}=100x")
    with refuses("--scale", "model.width") as caught:
        scale_up_text(study(), "model.width=10x")
    assert AXIS in str(caught.value)
    with refuses("--scale", AXIS):
        scale_up_text(study(sparsities=(0.0, 0.9)), f"{AXIS}=10x")
    with refuses("runs.size", "10000, 20000"):
        scale_up_text(study(sizes=SIZES[:2]), f"{AXIS}=10x")
    with refuses(f"study.grid.{AXIS}", "all"):
        runs_of_axis({Series(0.0, ((AXIS, "all"),)): fit_law([])}, AXIS)
    with refuses("--scale", AXIS):
        runs_of_axis({Series(0.0, ((AXIS, 1e4),)): fit_law([], why_inapplicable="B grows")}, AXIS)
