"""A study tells its noise scale before it starts, once, and beside the fitted law; or not, if it is
told not to."""

from __future__ import annotations

import pytest

from lit_dps.core.exit_codes import ExitCode
from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run_here
from tests.support.texts import in_one_line

ON = ("--study.noise_scale", True)
SMALL = ("--study.batch_sizes", "[16]", "--study.sparsities", "[0]", *ON)


CELLS = ("study", "--config", FAST, *SMALL, "--show", "cells")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the first command of a study, and its folder."""
    folder = tmp_path_factory.mktemp("noise")
    return run_here(folder, *CELLS, "--study.trials", 1), folder


@pytest.fixture(scope="module")
def folder(first):
    return first[1]


def test_the_first_guess_is_told_stored_and_reported(first):
    first, folder = first
    assert first.returncode == ExitCode.NO_RESULT
    noise = read_study(f"sqlite:///{folder}/mlruns/study.db", "fast").noise
    assert (noise.batch_size, noise.readings, noise.resolved) == (16, 64, True)
    assert f"study fast: {noise.sentence}" in first.stderr
    assert noise.sentence in in_one_line(first.stdout)


@pytest.mark.long
def test_it_is_measured_once(folder):
    again = run_here(folder, *CELLS, "--study.trials", 2)
    assert again.returncode == 0
    assert "noise scale" not in again.stderr and "noise scale" in again.stdout


@pytest.mark.long
def test_it_can_be_switched_off(folder):
    other = ("--study.trials", 1, "--study.noise_scale", False, "--study.name", "off")
    off = run_here(folder, "study", "--config", FAST, *SMALL, *other)
    assert off.returncode == ExitCode.NO_RESULT and "noise scale" not in off.stderr + off.stdout


def test_what_cannot_be_read_is_said_and_the_study_goes_on(folder):
    one = (
        "--study.batch_sizes",
        "[1]",
        "--study.sparsities",
        "[0]",
        *ON,
        "--study.trials",
        1,
        "--study.name",
        "one",
    )
    done = run_here(folder, "study", "--config", FAST, *one)
    assert done.returncode == ExitCode.NO_RESULT
    assert (
        "noise scale not measured: NoiseScaleCallback cannot halve a batch of 1 example"
        in done.stderr
    )
