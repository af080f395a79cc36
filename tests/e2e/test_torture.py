"""A short form of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import torture

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
]  # the tests of resuming kill processes too, not at random


def test_killed_processes_lose_nothing():
    report = torture("sqlite", kills=8, trials=4, pace=0.5, hits=3)
    assert report.kills.total() >= 8 and report.cut_short >= 3, (
        "it goes on until so many hit a trial"
    )
    assert report.good, report.line()
