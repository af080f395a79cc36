"""A PostgreSQL server of our own, on loopback, with a password, thrown away at the end."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "s3cret%2Fword"  # as it stands in a URL
USER = "nobody" if os.geteuid() == 0 else None  # the server refuses to run as root


class Unavailable(Exception):
    """Why there is no server to be had here."""


def programs() -> Path:
    """The folder of initdb and pg_ctl, which Debian does not put on the path."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not folders:
        raise Unavailable("PostgreSQL's server is not installed")
    if importlib.util.find_spec("psycopg") is None:
        raise Unavailable("psycopg is not installed")
    return folders[-1]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """A running server.

    Attributes:
        port: Where it listens on 127.0.0.1.
    """

    def __init__(self, folder: Path, port: int):
        self._folder, self.port = folder, port

    def ctl(self, action: str, *options: str) -> None:
        """pg_ctl, to its end."""
        log = ["-l", str(self._folder / "log")] if action == "start" else []
        command = [programs() / "pg_ctl", "-D", self._folder / "data", "-w", *log, *options, action]
        subprocess.run(
            command, user=USER, cwd="/", check=True, stdout=subprocess.DEVNULL, timeout=120
        )

    def start(self, connections: int = 60) -> None:
        place = (
            f"-p {self.port} -c listen_addresses=127.0.0.1 -c "
            f"unix_socket_directories={self._folder}"
        )
        self.ctl("start", "-o", f"{place} -c fsync=off -c max_connections={connections}")

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://postgres:{password}@127.0.0.1:{self.port}/{database}"

    def new_database(self, name: str) -> str:
        """The URL of a new, empty database."""
        from sqlalchemy import create_engine, text

        engine = create_engine(self.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"create database {name}"))
        engine.dispose()
        return self.url(name)


@contextmanager
def server(connections: int = 60) -> Iterator[Server]:
    """Raises Unavailable where there can be none. It takes so many connections at a time."""
    initdb = programs() / "initdb"
    folder = Path(tempfile.mkdtemp(prefix="lit_dps-postgres-"))
    try:
        (folder / "password").write_text("s3cret/word")
        if USER:
            for path in (folder, folder / "password"):
                shutil.chown(path, USER)
        options = [
            "-U",
            "postgres",
            "-A",
            "scram-sha-256",
            f"--pwfile={folder}/password",
            "-D",
            folder / "data",
            "-N",
        ]
        done = subprocess.run(
            [initdb, *options], user=USER, cwd="/", capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise Unavailable(f"initdb: {done.stderr.strip()}")
        running = Server(folder, free_port())
        running.start(connections)
        try:
            yield running
        finally:
            running.ctl("stop", "-m", "immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
