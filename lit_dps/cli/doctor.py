"""doctor: check what this machine and its storage can do, with remedies.

Each line is ok, a warning or an error. An error gives exit code 1. Nothing is created.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from lit_dps import __version__
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import print_document, stdout_on_stderr
from lit_dps.cli.parser import new_parser
from lit_dps.core.config import StorageConfig, cores
from lit_dps.core.errors import UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.text import counted, escape, for_terminal
from lit_dps.storage.urls import (
    check_place,
    check_writable,
    nearest_existing,
    scrubbed,
    sqlite_file,
    without_password,
)

OK = "ok"
WARNING = "warning"
ERROR = "error"
STATUSES = (OK, WARNING, ERROR)  # the worst is last
PACKAGES = ("torch", "lightning", "optuna", "mlflow")
GIB = 2**30
MAX_GPUS_SHOWN = 4
# A worker takes about 0.5 GiB with PyTorch imported, before it trains.
MIN_MEMORY_GIB = 1.0
MIN_DISK_GIB = 1.0
SCHEMA = 1  # of the JSON object
STATUS_CHARACTERS = 9  # before the name of a check
JSON = "Print one JSON object: schema, status (the worst), and checks with name, status, result "
JSON += "and remedy."


class Check(NamedTuple):
    """One line of `lit-dps doctor`.

    Attributes:
        name: What was checked.
        status: `OK`, `WARNING` or `ERROR`.
        result: What was seen.
        remedy: What to do; empty if nothing is wrong.
    """

    name: str
    status: str
    result: str
    remedy: str = ""

    def line(self) -> str:
        """Return the check as a line of text."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status:8} {self.name}: {self.result}{remedy}"


def examine(storage: StorageConfig) -> list[Check]:
    """Return the checks of this machine and a storage, in the order of the output.

    Args:
        storage: Where studies are kept. Nothing is created there.
    """
    return [
        versions(),
        processors(),
        memory(),
        *gpus(),
        storage_folder(storage),
        optuna_storage(storage),
        mlflow_store(storage),
    ]


def worst(checks: list[Check]) -> str:
    """Return the worst status of some checks."""
    return max((check.status for check in checks), key=STATUSES.index)


def versions() -> Check:
    """Check that the packages are installed, and report their versions."""
    parts = [f"lit_dps {__version__}", f"Python {platform.python_version()}"]
    missing = []
    for name in PACKAGES:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = f"install {', '.join(missing)}, or lit_dps again"
        return Check("versions", ERROR, f"{', '.join(missing)} missing", remedy)
    return Check("versions", OK, ", ".join(parts))


def processors() -> Check:
    """Report the cores that this process may use."""
    usable = cores()
    text = f"{usable} of {os.cpu_count() or usable} usable by this process"
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        text += f", OMP_NUM_THREADS = {threads}"
    return Check("cores", OK, text)


def memory() -> Check:
    """Report the memory of the machine, and what Linux reports as available."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / GIB:.1f} GiB"
    available = _available_bytes()
    if available is None:
        return Check("memory", OK, text)
    text += f", {available / GIB:.1f} GiB available (a container may allow less)"
    if available < MIN_MEMORY_GIB * GIB:
        return Check("memory", WARNING, text, "end other programs, or set --study.workers 1")
    return Check("memory", OK, text)


def _available_bytes() -> float | None:
    """Return the memory that Linux reports as available; None on other systems."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def gpus() -> list[Check]:
    """Import PyTorch, and report each GPU with its memory and bf16 support."""
    try:
        torch = import_module("torch")
    except Exception as error:
        return [Check("GPU", ERROR, f"PyTorch cannot be imported: {error}", "install torch again")]
    if not torch.cuda.is_available():
        built_for = "CPUs"
        if torch.version.cuda is not None:
            built_for = f"CUDA {torch.version.cuda}"
        text = f"none is visible to PyTorch (built for {built_for}); trials train on the CPU"
        return [Check("GPU", OK, text)]
    checks = []
    count = torch.cuda.device_count()
    for i in range(min(count, MAX_GPUS_SHOWN)):
        properties = torch.cuda.get_device_properties(i)
        # bf16 has hardware from compute capability 8.0 on.
        bf16 = "bf16" if properties.major >= 8 else "no bf16"
        text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {bf16}"
        checks.append(Check(f"GPU {i}", OK, text))
    if count > MAX_GPUS_SHOWN:
        checks.append(Check("GPU", OK, f"{count - MAX_GPUS_SHOWN} more"))
    return checks


def storage_folder(storage: StorageConfig) -> Check:
    """Check that the storage folder, or the folder where it will be created, is writable."""
    folder = Path(storage.folder)
    name = "storage folder"
    remedy = "choose another folder by --storage.folder"
    try:
        existing = nearest_existing(folder.absolute())
        is_folder = existing.is_dir()
    except OSError as error:  # below a folder that may not be entered
        return Check(name, ERROR, f"{folder}: {error.strerror or error}", remedy)
    if not is_folder:
        return Check(name, ERROR, f"{existing} is a file", remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(name, ERROR, f"{existing} is not writable", remedy)
    text = str(folder) if existing == folder.absolute() else f"{folder} (will be created)"
    free = shutil.disk_usage(existing).free / GIB
    text += f", {free:.1f} GiB free"
    if free < MIN_DISK_GIB:
        return Check(name, WARNING, text, "free some space")
    return Check(name, OK, text)


def optuna_storage(storage: StorageConfig) -> Check:
    """Check that the studies of the Optuna storage can be read, and that its file can be written.

    A server is asked for its studies only.
    """

    def count(url: str) -> str:
        from lit_dps.storage.read import list_studies  # imports Optuna, which may be missing

        studies = len(list_studies(url))
        return "1 study" if studies == 1 else f"{studies} studies"

    remedy = "choose another --storage.optuna, or start its server"
    return _database("Optuna", storage.optuna_url, count, ERROR, remedy)


def mlflow_store(storage: StorageConfig) -> Check:
    """Check that MLflow's tracking store answers. A study runs without it, so this is a warning."""

    def count(uri: str) -> str:
        from lit_dps.tracking.client import experiments  # imports MLflow, which may be missing

        return counted(len(experiments(uri)), "experiment")

    remedy = "a study runs without it; check --storage.mlflow"
    return _database("MLflow", storage.mlflow_uri, count, WARNING, remedy)


def _database(name: str, url: str, count: Callable[[str], str], level: str, remedy: str) -> Check:
    """Return the check of a database.

    Args:
        name: What it belongs to.
        url: Its address.
        count: Reads it, and returns how many entries it has as text.
        level: How bad a database is that cannot be used.
        remedy: What to do if it cannot be used.
    """
    shown = without_password(url)
    try:
        file = sqlite_file(url)
        if file is not None:
            check_place(url)
            check_writable(url)
            if not file.is_file():
                return Check(name, OK, f"{shown} (will be created)")
        entries = count(url)
    except (UserError, ImportError, OSError) as error:
        return Check(name, level, scrubbed(" ".join(str(error).split()), url), remedy)
    return Check(name, OK, f"{shown}, {entries}")


def main(command: CommandLine) -> int:
    """Print the checks, and return the exit code."""
    parser = new_parser(command, __doc__)
    parser.add_argument("--json", action="store_true", help=JSON)
    config = parser.read_command()
    with stdout_on_stderr():
        checks = examine(config.storage)
    status = worst(checks)
    if config.json:
        rows = [check._asdict() for check in checks]
        print_document({"schema": SCHEMA, "status": status, "checks": rows})
    else:
        for check in checks:
            print(for_terminal(escape(check.line()), " " * STATUS_CHARACTERS))
    return ExitCode.FAILED if status == ERROR else ExitCode.DONE
