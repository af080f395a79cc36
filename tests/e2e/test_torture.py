"""A short form of `make torture`."""

from __future__ import annotations

import pytest

from tests.torture import torture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_killed_processes_lose_nothing():
    report = torture("sqlite", kills=10, trials=4, pace=0.5)
    assert report.kills.total() >= 10
    assert report.share >= 0.3, f"most kills hit nothing: {report.line()}"  # 0.6 in the long run of 100
    assert report.good, report.line()
