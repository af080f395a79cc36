"""Fixtures of the tests of claims."""

import pytest


@pytest.fixture
def certain_searches(monkeypatch):
    """Other searches find the same K*, so that only the spread of trials and checks are noise."""
    monkeypatch.setattr("lit_dps.analysis.observations.SEED_NOISE", 0.0)
    for module in ("analysis.observations", "analysis.analysis"):
        monkeypatch.setattr(f"lit_dps.{module}.noise_of_search", lambda *_: 0.0)
