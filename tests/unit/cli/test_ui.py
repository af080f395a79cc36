"""The server that `ui` starts: for this machine alone, and without a password among its
arguments."""

from __future__ import annotations

import os
import socket

import pytest

from lit_dps.cli import main
from lit_dps.tracking import client as mlflow_client
from tests.support.errors import refusals_in
from tests.support.texts import numbers_in


class Started(Exception):
    pass


@pytest.mark.parametrize(
    "uri", ["postgresql+psycopg://me:secret@host/db", "sqlite:///mlruns/mlflow.db"]
)
def test_it_binds_to_loopback_and_hides_the_address_of_its_database(uri, monkeypatch):
    arguments = []

    def execv(program, argv):
        arguments.extend(argv)
        raise Started

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    monkeypatch.setattr(mlflow_client, "experiments", lambda uri: [])
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "")
    with pytest.raises(Started):
        main(["ui", "--storage.mlflow", uri, "--port", port])
    assert arguments[-4:] == ["--host", "127.0.0.1", "--port", port]
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == uri
    assert not any("secret" in argument for argument in arguments)


def test_a_server_that_is_there_is_named_and_none_started(monkeypatch, capsys):
    monkeypatch.setattr(mlflow_client, "experiments", lambda uri: [])
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("a second server was started"))
    assert main(["ui", "--storage.mlflow", "http://127.0.0.1:5000"]) == 0
    assert "Ctrl-C" not in capsys.readouterr().out


@pytest.mark.parametrize("port", [99999, 0, -1])
def test_what_is_no_port_is_refused_before_a_server_starts(port, monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("a server was started"))
    assert main(["ui", "--port", str(port)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and refusals_in(error) == [("--port", str(port))] and error.count("\n") == 1
    assert numbers_in(error)[-2:] == [1, 65535]


def test_a_port_in_use_is_refused_before_a_server_starts(monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *args: pytest.fail("a server was started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 2
    said = f"--port is {port}; it must be a port that is free on 127.0.0.1 (Address already in use)"
    assert capsys.readouterr() == ("", f"lit-dps: error: {said}\n")
