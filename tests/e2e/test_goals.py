"""`study.goals`: further goal errors that the same runs answer."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, results, table

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST, "--study.trials", 2)
FIGURES = Path("mlruns") / "figures" / "fast"


def k_stars(path: Path) -> dict[tuple[int, float], int | None]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        (int(r["batch_size"]), float(r["sparsity"])): int(r["k_star"]) if r["k_star"] else None
        for r in rows
    }


def first_steps(record, goal: float) -> dict[tuple[int, float], int | None]:
    """K* at a goal, straight from the curves: the first check of any trial of a cell that met
    it."""
    found = {}
    for cell, trials in record.results.items():
        curves = [
            zip(trial.curve["step"], trial.curve["val_error"], strict=True) for trial in trials
        ]
        met = [step for curve in curves for step, error in curve if error <= goal + 1e-6]
        found[cell.batch_size, cell.sparsity] = min(met, default=None)
    return found


def test_each_goal_has_its_tables_and_goals_extend_a_study(tmp_path, call):
    first = call(*STUDY, "--study.goals", "[0.4]")
    assert first.code == 0, first.err
    stored, own = results(tmp_path / "mlruns" / "study.db"), table(tmp_path)
    further = (tmp_path / FIGURES / "goal-0.4" / "table.txt").read_text()
    assert "goal error 0.2 " in own and "goal error 0.4 " in further
    assert first.out.index("goal error 0.2.") < first.out.index("goal error 0.4.")
    record = read_study(f"sqlite:///{tmp_path}/mlruns/study.db", "fast")
    at_own, at_further = (
        k_stars(tmp_path / FIGURES / "table.csv"),
        k_stars(tmp_path / FIGURES / "goal-0.4/table.csv"),
    )
    assert (at_own, at_further) == (first_steps(record, 0.2), first_steps(record, 0.4))
    assert at_own != at_further, "a goal that costs nothing more tests nothing"

    more = call(*STUDY, "--study.goals", "[0.6]")
    assert more.code == 0, more.err
    assert "no trials remain" in more.err
    assert results(tmp_path / "mlruns" / "study.db") == stored
    assert table(tmp_path) == own
    for goal in (0.4, 0.6):  # those of the first run stay
        assert f"goal error {goal}." in more.out
        assert k_stars(tmp_path / FIGURES / f"goal-{goal}" / "table.csv") == first_steps(
            record, goal
        )

    analyzed = call("analyze", "--config", FAST)
    assert analyzed.code == 0, analyzed.err
    assert all(f"goal error {goal}." in analyzed.out for goal in (0.2, 0.4, 0.6))
