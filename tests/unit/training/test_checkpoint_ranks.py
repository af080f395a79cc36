"""A trial of several ranks that is interrupted goes on from the first one's checkpoint, to the last
bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.parallel import ranks
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.saved_study import GOAL, USER, USER_DATA, Study
from tests.unit.engines.test_engine import PARAMS, quiet  # noqa: F401


def taken_up(folder: Path, trial: Trial, checks: tuple[int, ...], options: dict) -> dict:
    """What a rank sees of a trial that is interrupted after so many checks of each attempt.

    The folder of the others is not there: they must not need it.
    """
    study = Study(folder if ranks.rank() == 0 else folder / "elsewhere", **options)
    whole, reference = study.run(trial, saved=False)
    broken = [study.run(trial, interrupt=n) for n in checks]
    result, steps = study.run(trial)
    return {
        "broken": [result for result, _ in broken],
        "said": study.said,
        "same result": result == whole,
        "same weights": torch.equal(steps.weights, reference.weights),
        "repeated": sum(s.taken for _, s in broken) + steps.taken - reference.taken,
    }


def expected(trial: Trial, checks: tuple[int, ...]) -> dict:
    steps = [4 * sum(checks[: i + 1]) for i in range(len(checks))]
    said = [f"{trial.cell} sample {trial.point} resumes from step {step}" for step in steps]
    none = [None] * len(checks)
    return {"broken": none, "said": said, "same result": True, "same weights": True, "repeated": 0}


@pytest.mark.parametrize(
    ("world", "batch_size"), [pytest.param(2, 100, marks=pytest.mark.long), (4, 2)]
)
def test_our_module_and_data(tmp_path, world, batch_size):
    trial = Trial(Cell(batch_size, 0.9), 1, PARAMS)
    options = {"goal": {**GOAL, "early_reject": True}}
    assert same_on_ranks(world, taken_up, tmp_path, trial, (2, 5), options) == expected(
        trial, (2, 5)
    )


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_users_module_draws_on_each_rank_what_it_would_have_drawn(tmp_path, accumulate):
    trial = Trial(
        Cell(7 * accumulate, 0.3), 0, {"model.rate": 0.01}
    )  # parts of 3 and 4, 50 examples: across epochs
    trainer = {"accumulate_grad_batches": accumulate}
    data = {"class_path": USER_DATA}
    options = {"model": USER, "data": data, "trainer": trainer, "goal": {**GOAL, "max_steps": 40}}
    assert same_on_ranks(2, taken_up, tmp_path, trial, (1, 3, 2), options) == expected(
        trial, (1, 3, 2)
    )


def test_batches_masks_and_readings_that_change(tmp_path):
    """The batch grows at steps 10 and 20, and the mask changes at every third step."""
    trial = Trial(Cell(16, 0.5), 1, PARAMS)
    options = {
        "pruning": {"method": "tests.support.user_readings.Redraws"},
        "batch": {"schedule": "doubling", "options": {"start": 0.25, "steps": 10}},
        "readings": ["gradient_norm"],
    }
    assert same_on_ranks(2, taken_up, tmp_path, trial, (2, 4), options) == expected(trial, (2, 4))


def paused(folder: Path, trial: Trial) -> tuple:
    study = Study(folder)
    limit = 12 if ranks.rank() == 0 else 99  # the others know nothing of other trials
    first, steps = study.run(trial, pause=lambda cell: limit)
    second, more = study.run(trial)
    return first.status, steps.taken, dataclasses.replace(second, curve={}, timed={}), more.taken


def test_a_trial_pauses_on_all_ranks_where_the_first_one_says(tmp_path):
    trial = Trial(Cell(16, 0.5), 1, PARAMS)
    status, taken, second, more = same_on_ranks(2, paused, tmp_path, trial)
    assert (status, taken) == (Status.PAUSED, 12)
    assert (taken + more, second.status) == (60, Status.INCOMPLETE)


def interrupted(folder: Path, trial: Trial) -> list[str]:
    study = Study(folder)
    study.run(trial, interrupt=2)
    return study.said


def resumed(folder: Path, trial: Trial) -> list[str]:
    study = Study(folder)
    study.run(trial)
    return study.said


def test_another_number_of_ranks_begins_anew(tmp_path):
    trial = Trial(Cell(16, 0.5), 1, PARAMS)
    same_on_ranks(2, interrupted, tmp_path, trial)
    for other in on_ranks(1, resumed, tmp_path, trial):
        (line,) = other
        assert line.startswith(f"{trial} restarts") and "another" in line


def with_a_full_disk(folder: Path, trial: Trial) -> tuple:
    study = Study(folder)
    whole, _ = study.run(trial, saved=False)
    if ranks.rank() == 0:
        folder.joinpath("B=16 S=0.5").write_text("a file where the folder has to be")
    return study.run(trial)[0] == whole, study.said


def test_a_file_that_the_first_rank_cannot_write_stops_no_one(tmp_path):
    same, said = same_on_ranks(2, with_a_full_disk, tmp_path, Trial(Cell(16, 0.5), 1, PARAMS))
    assert same and said[0].startswith("warning: ")
