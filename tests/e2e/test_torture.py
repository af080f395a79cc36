"""A short form of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_killed_processes_lose_nothing():
    report = torture("sqlite", kills=6, trials=4)
    assert report.kills.total() >= 6
    assert report.good, report.line()
