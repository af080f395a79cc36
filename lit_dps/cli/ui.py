"""ui: browse studies in MLflow.

It starts the MLflow server on this machine and prints the addresses of the pages of studies.
"""

from __future__ import annotations

import os
import socket
import sys

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.parser import new_parser
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import escape
from lit_dps.storage.urls import is_http

HOST = "127.0.0.1"


def main(command: CommandLine) -> int:
    """Print the pages of studies, and replace this process by the server."""
    parser = new_parser(command, __doc__)
    parser.add_argument("--port", type=int, default=5000, help=f"Port on {HOST}.")
    config = parser.read_command()
    uri = config.storage.mlflow_uri
    has_server = is_http(uri)
    _check_port(config.port, must_be_free=not has_server)

    from lit_dps.tracking.client import experiments
    from lit_dps.tracking.pages import page_address

    for experiment in experiments(uri):
        address = page_address(uri, experiment.experiment_id, port=config.port)
        print(f"{escape(experiment.name)}: {address}")
    if has_server:
        return 0
    print("Ctrl-C ends the server; it starts in about 5 seconds.", flush=True)
    # Studies do not need the few background processes of jobs.
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    # Everybody on the machine can read the arguments of a process, so the URI is a variable.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri
    # Neither the server nor its children look for modules in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    server = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(config.port)]
    os.execv(sys.executable, server)


def _check_port(port: int, must_be_free: bool) -> None:
    """Raise ConfigError for a number that is no port, or for a port in use if it must be free."""
    if not 1 <= port <= 65535:
        raise ConfigError("--port", port, "a port from 1 to 65535")
    if not must_be_free:
        return
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        # The text of the error repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError("--port", port, f"a port that is free on {HOST} ({reason})") from error
