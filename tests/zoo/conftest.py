"""Fixtures of the zoo."""

from __future__ import annotations

from functools import partial

import pytest

from tests.zoo.run import study


@pytest.fixture
def zoo(tmp_path):
    """Runs a study in the test's folder; see `tests.zoo.run.study`."""
    return partial(study, tmp_path)
