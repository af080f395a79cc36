"""ui: the MLflow server on this machine, with the address of the page that shows the studies."""

from __future__ import annotations

import os
import sys

from lit_dps.commands.parser import PlainParser
from lit_dps.storage import is_http
from lit_dps.study.config import StorageConfig


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "ui". The server takes the place of this process."""
    parser = PlainParser(prog="lit-dps ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000, help="Port on 127.0.0.1.")
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    uri = config.storage.mlflow_uri

    from lit_dps import tracking

    for experiment in tracking.experiments(uri):
        print(f"{experiment.name}: {tracking.page_address(uri, experiment.experiment_id, port=config.port)}")
    if is_http(uri):
        return 0  # it is a server already
    print("Ctrl-C ends the server; it starts in about 5 seconds.", flush=True)
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # a few background processes that studies do not need
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri  # and no argument, which everybody on the machine can read
    server = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(config.port)]
    os.execv(sys.executable, server)
