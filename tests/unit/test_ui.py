"""The server that `ui` starts: for this machine alone, and without a password among its arguments."""

from __future__ import annotations

import os

import pytest

from lit_dps import tracking
from lit_dps.cli import main


class Started(Exception):
    pass


@pytest.mark.parametrize("uri", ["postgresql+psycopg://me:secret@host/db", "sqlite:///mlruns/mlflow.db"])
def test_it_binds_to_loopback_and_hides_the_address_of_its_database(uri, monkeypatch):
    arguments = []

    def execv(program, argv):
        arguments.extend(argv)
        raise Started

    monkeypatch.setattr(tracking, "experiments", lambda uri: [])
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "")
    with pytest.raises(Started):
        main(["ui", "--storage.mlflow", uri, "--port", "5005"])
    assert arguments[-4:] == ["--host", "127.0.0.1", "--port", "5005"]
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == uri
    assert not any("secret" in argument for argument in arguments)


def test_a_server_that_is_there_is_named_and_none_started(monkeypatch, capsys):
    monkeypatch.setattr(tracking, "experiments", lambda uri: [])
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("a second server was started"))
    assert main(["ui", "--storage.mlflow", "http://127.0.0.1:5000"]) == 0
    assert "Ctrl-C" not in capsys.readouterr().out
