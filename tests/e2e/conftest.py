"""Fixtures of the commands' tests."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from lit_dps.cli import main
from tests.e2e.commands import FAST, run_here


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Runs commands in the test's folder and in this process, which saves the seconds that the
    imports take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_DPS_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["lit-dps"])

    def run(*args: object) -> Done:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """The folder of the fast study, run to its end undisturbed, one trial at a time."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = run_here(folder, "study", "--config", FAST)
    assert done.returncode == 0, done.stderr
    return folder
