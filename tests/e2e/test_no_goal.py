"""What is said where a command ends without what it was started for: no goal, no configuration
file."""

from __future__ import annotations

import re

import pytest

from tests.e2e.commands import FAST

QUIET = ("--trainer.enable_progress_bar", "false", "--trainer.logger", "false")
SHIPPED = "`lit-dps configs quickstart`"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (10, r"10 steps, before its goal \(val_error 0\.\d{4} at step 8\)"),
        (2, "2 steps, before its first check"),
        (1, "1 step, before its first check"),
    ],
)
def test_a_fit_that_is_stopped_before_its_goal_says_so(call, steps, said):
    done = call(
        "fit", "--config", FAST, *QUIET, "--model.learning_rate", 1e-3, "--trainer.max_steps", steps
    )
    assert done.code == 0, done.err
    assert re.fullmatch(f"no result: the trainer stopped after {said}", done.out.splitlines()[-1])


@pytest.mark.parametrize("verb", ["study", "fit"])
def test_a_shipped_file_that_is_not_here_is_said_to_come_with_the_package(call, tmp_path, verb):
    done = call(verb, "--config", "configs/quickstart.yaml")
    assert done.code == 2 and done.err.count("\n") == 1
    assert SHIPPED in done.err and "'configs/quickstart.yaml'" in done.err
    assert SHIPPED not in call(verb, "--config", "mine.yaml").err
    assert list(tmp_path.iterdir()) == []


def test_replicate_refuses_a_folder_without_studies(call, tmp_path):
    done = call("replicate", "--configs", "mine")
    said = (
        "lit-dps: error: configs is 'mine'; it must be a folder with a .yaml file for each study\n"
    )
    assert (done.code, done.err) == (2, said)
    assert list(tmp_path.iterdir()) == []
