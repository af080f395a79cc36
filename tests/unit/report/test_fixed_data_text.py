"""`analyze --examples`: what a batch size costs in loss with a fixed number of examples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.report.fixed_data import fixed_data_text
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, result

SIZES = (16, 32, 64, 128, 256, 512)
C1 = 32_000.0
C2 = 100.0
POWER = 0.1


def study(sizes=SIZES, metric: str = "val_loss", checks: int = 4) -> Analysis:
    """A study with K = c1 / B + c2, whose loss falls with the power -0.1 of the examples."""
    results = {}
    for batch_size in sizes:
        cell = Cell(batch_size, 0.0)
        steps = round(C1 / batch_size + C2)
        seen = np.arange(checks, steps + 1, checks)
        loss = 5 * (seen * batch_size / (1 + batch_size * C2 / C1)) ** -POWER
        curve = {
            "step": seen.tolist(),
            "train_loss": loss.tolist(),
            metric: loss.tolist(),
            "exact": [1] * len(seen),
        }
        results[cell] = [dataclasses.replace(result(cell, 0, steps), curve=curve)]
    goal = Goal(1.8, metric=metric, check_interval=checks, max_steps=100_000)
    return analysis_of(results, goal=goal)


def test_the_text_has_the_cost_of_the_closed_form():
    """With loss = A N^-alpha the cost is ((1 + B / C) / (1 + B0 / C))^alpha - 1."""
    title, *lines = fixed_data_text(study(), 30_000).splitlines()
    assert title.startswith("fixed data, S=0: With 30000 examples batch sizes up to 32 cost less")
    for line, batch_size in zip(lines, SIZES, strict=True):
        start, _, rest = line.partition(", val_loss ")
        steps = float(start.removeprefix(f"  B = {batch_size}: ").removesuffix(" steps"))
        assert steps == pytest.approx(30_000 / batch_size, rel=5e-3)
        cost = ((1 + batch_size * C2 / C1) / (1 + 16 * C2 / C1)) ** POWER - 1
        assert float(rest.split()[0]) == pytest.approx(100 * cost, rel=0.1, abs=0.05)


def test_more_examples_than_the_smallest_batch_size_trained_on_take_a_larger_one():
    lines = fixed_data_text(study(), 36_000).splitlines()
    assert "at B = 64" in lines[0], "16 and 32 end at 33,600 and 35,200 examples"
    assert [line.endswith("extrapolated") for line in lines[1:]] == [True] * 2 + [False] * 4


def test_what_the_study_does_not_know_is_refused():
    with refuses("--examples", 1e6):
        fixed_data_text(study(), 1e6)
    with refuses("--examples", study().record.name):
        fixed_data_text(study(metric="val_gap"), 30_000)
    assert "B_crit is not identifiable" in fixed_data_text(study(sizes=(16, 32)), 30_000)
