"""The number of readings of a study's noise scale is fixed, or the time that ended them is told."""

from __future__ import annotations

import dataclasses
from itertools import count
from types import SimpleNamespace

import pytest

from lit_dps.core.noise_scale import NoiseScale
from lit_dps.study.noise import STEPS, first_guess, short_run
from tests.support.texts import numbers_in
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.study.test_side_effects import SETUP


@pytest.fixture
def clock(monkeypatch):
    """Each reading of the clock is half a second after the one before."""
    seconds = count()
    fake = SimpleNamespace(monotonic=lambda: next(seconds) / 2)
    monkeypatch.setattr("lit_dps.study.noise.time", fake)


def test_a_slow_run_has_the_planned_readings_while_its_time_lasts(clock):
    found = first_guess(SETUP)
    assert (found.readings, found.planned, found.stopped_after) == (STEPS, 64, None)
    assert "of 64" not in found.sentence


def test_a_run_that_its_time_ends_keeps_and_tells_its_readings(clock):
    found = short_run(SETUP, 32, SETUP.middle, STEPS, 5.0)
    # The clock is read once before the first step: the 11th step ends after 5.5 s.
    assert (found.readings, found.planned, found.stopped_after) == (11, 64, 5.0)
    assert NoiseScale.from_dict(found.to_dict()) == found
    assert "11 of 64 readings at B = 32, stopped after 5.0 s" in found.sentence


def test_the_first_values_of_axes_are_named(clock):
    axes = {"model.momentum": [0.5, 0.9], "pruning.method": ["random", "magnitude"]}
    space = {key: box for key, box in SETUP.study.space.items() if key not in axes}
    study = dataclasses.replace(SETUP.study, grid=axes, space=space)
    found = first_guess(dataclasses.replace(SETUP, study=study))
    assert found.axes == {"model.momentum": 0.5}
    assert NoiseScale.from_dict(found.to_dict()) == found
    assert "at B = 32, model.momentum = 0.5" in found.sentence


def test_a_run_that_its_time_ends_at_once_has_a_reason(clock):
    assert numbers_in(short_run(SETUP, 32, SETUP.middle, STEPS, 0.0)) == [1, 64, 0, 2]


def test_a_noise_scale_of_an_earlier_version_is_readable():
    stored = NoiseScale(0.2, 0.01, 22.2, 2.0, 79.2, 1984.0, 64, 32).to_dict()
    del stored["planned"], stored["stopped_after"], stored["axes"]
    found = NoiseScale.from_dict(stored)
    assert (found.readings, found.planned, found.stopped_after) == (64, None, None)
    assert "64 readings at B = 32" in found.sentence
