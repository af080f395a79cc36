"""Racing and early checks change what a study costs, and nothing of what it finds."""

from __future__ import annotations

import pytest

from lit_dps.analysis.summary import summarize
from lit_dps.core.racing import truncate_at_race_limit
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import MINIMUM
from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run, run_here, table


def study(folder, *options: object) -> StudyRecord:
    """Runs the fast study in a folder, or takes it up again there."""
    folder.mkdir(exist_ok=True)
    here = (
        run if "--study.workers" in options else run_here
    )  # of several workers each would import for itself
    done = here(folder, "study", "--config", FAST, *options)
    assert done.returncode == 0, done.stderr
    return read_study(f"sqlite:///{folder}/mlruns/study.db", "fast")


def steps_run(record: StudyRecord) -> int:
    return sum(result.steps_run for results in record.results.values() for result in results)


@pytest.mark.slow
def test_a_raced_study_finds_the_same_for_less(tmp_path, unbroken):
    full = read_study(f"sqlite:///{unbroken}/mlruns/study.db", "fast")
    one = study(tmp_path / "one", "--study.race_factor", 1, "--goal.early_reject", "true")
    two = study(
        tmp_path / "two",
        "--study.race_factor",
        1,
        "--goal.early_reject",
        "true",
        "--study.workers",
        2,
    )
    best = [(cell.k_star, cell.best.trial.point) for cell in summarize(full)]
    assert None not in best
    assert [(cell.k_star, cell.best.trial.point) for cell in summarize(one)] == best
    assert table(tmp_path / "one") == table(tmp_path / "two")
    assert steps_run(one) == steps_run(two) < steps_run(full)
    for cell in full.cells:
        raced = [
            (r.status, r.steps, r.curve["step"], r.curve["train_loss"]) for r in one.results[cell]
        ]
        told = [
            (r.status, r.steps, r.curve["step"], r.curve["train_loss"])
            for r in truncate_at_race_limit(full.results[cell], 1, MINIMUM)
        ]
        assert raced == told, "as the full study stood at K*"

    # taken up again without racing it ends as the full study, and loses nothing
    again = study(tmp_path / "one", "--study.race_factor", "null", "--goal.early_reject", "false")
    assert table(tmp_path / "one") == table(unbroken)
    for cell in full.cells:
        assert [(r.status, r.steps) for r in again.results[cell]] == [
            (r.status, r.steps) for r in full.results[cell]
        ]


@pytest.mark.long  # tests/unit/storage/test_run_on.py has the values
@pytest.mark.slow
def test_goals_added_later_are_answered_as_far_as_the_checks_tell(tmp_path):
    goals = ("--study.goals", "[0.4]", "--study.batch_sizes", "[16]")
    full = study(tmp_path / "full", *goals)
    early = study(tmp_path / "early", *goals, "--goal.early_reject", "true")
    assert early.goals == full.goals == (0.4,)
    below = "goal-0.4/table.txt"
    tables = [
        (tmp_path / name / "mlruns/figures/fast" / below).read_text() for name in ("full", "early")
    ]
    assert tables[0] == tables[1]
