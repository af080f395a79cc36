"""A short form of `make torture`."""

from __future__ import annotations

import pytest

from tests.support.postgres import Server
from tests.torture import CHANGING, torture

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


@pytest.mark.parametrize("storage", ["sqlite", "postgres"])
def test_batches_masks_and_readings_that_change_are_resumed(storage, request):
    """Two workers, or two ranks, of two commands are killed within changes; see `CHANGING`."""
    if storage == "postgres":
        server = request.getfixturevalue("postgres_server")  # skips without PostgreSQL
        assert isinstance(server, Server)
    report = torture(storage, kills=4, trials=4, pace=0.5, hits=2, options=CHANGING)
    assert report.kills.total() >= 4 and report.cut_short >= 2
    assert report.good, report.line()
