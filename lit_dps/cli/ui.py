"""ui: the MLflow server on this machine, with the address of the page that shows the studies."""

from __future__ import annotations

import os
import socket
import sys

from lit_dps.cli.parser import PlainParser
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import escape
from lit_dps.storage.urls import is_http

HOST = "127.0.0.1"


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "ui". The server takes the place of this process."""
    parser = PlainParser(prog="lit-dps ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000, help=f"Port on {HOST}.")
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    uri = config.storage.mlflow_uri
    _check_port(config.port, free=not is_http(uri))

    from lit_dps.tracking.client import experiments
    from lit_dps.tracking.pages import page_address

    for experiment in experiments(uri):
        print(
            f"{escape(experiment.name)}: "
            f"{page_address(uri, experiment.experiment_id, port=config.port)}"
        )
    if is_http(uri):
        return 0  # it is a server already
    print("Ctrl-C ends the server; it starts in about 5 seconds.", flush=True)
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = (
        "false"  # a few background processes that studies do not need
    )
    os.environ["MLFLOW_BACKEND_STORE_URI"] = (
        uri  # and no argument, which everybody on the machine can read
    )
    # Neither the server nor its children look for modules in the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    server = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(config.port)]
    os.execv(sys.executable, server)


def _check_port(port: int, free: bool) -> None:
    """Raises ConfigError for what is no port, or, if it has to be free, one that a server cannot
    take."""
    if not 1 <= port <= 65535:
        raise ConfigError("--port", port, "a port from 1 to 65535")
    if free:
        try:
            socket.create_server((HOST, port)).close()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError("--port", port, f"a port that is free on {HOST} ({why})") from error
