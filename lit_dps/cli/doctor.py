"""doctor: check what this machine and its storage can do, with remedies.

Each line is ok, a warning or an error. An error gives exit code 1. Nothing is created.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from lit_dps import __version__
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import print_document, stdout_on_stderr
from lit_dps.cli.parser import new_parser
from lit_dps.core.config import StorageConfig, cores
from lit_dps.core.errors import UserError
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.text import counted, escape, for_terminal
from lit_dps.data.files import ENV, data_root
from lit_dps.storage.urls import nearest_existing, scrubbed, sqlite_file, without_password

OK = "ok"
WARNING = "warning"
ERROR = "error"
STATUSES = (OK, WARNING, ERROR)  # the worst is last
PACKAGES = ("torch", "lightning", "optuna", "mlflow")
CGROUP = Path("/sys/fs/cgroup")
NVIDIA_DEVICE = Path("/dev/nvidia0")  # exists if a driver of NVIDIA is loaded
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


@dataclass(frozen=True)
class Machine:
    """What the checks read of this machine, so that tests can replace it.

    Attributes:
        version_of: Returns the version of an installed package; raises PackageNotFoundError.
        import_torch: Imports and returns PyTorch.
        cgroup: The folder of the limits of a container.
        nvidia_device: The file of the first GPU of NVIDIA.
        environment: The environment variables.
        cores: Returns the number of cores that this process may use.
        all_cores: Returns the number of cores of the machine.
    """

    version_of: Callable[[str], str] = version
    import_torch: Callable[[], Any] = lambda: __import__("torch")
    cgroup: Path = CGROUP
    nvidia_device: Path = NVIDIA_DEVICE
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cores: Callable[[], int] = cores
    all_cores: Callable[[], int | None] = os.cpu_count


def examine(storage: StorageConfig, machine: Machine | None = None) -> list[Check]:
    """Return the checks of this machine and a storage, in the order of the output.

    Args:
        storage: Where studies are kept. Nothing is created there.
        machine: What is read of this machine.
    """
    machine = machine or Machine()
    return [
        versions(machine),
        processors(machine),
        memory(machine),
        *gpus(machine),
        storage_folder(storage),
        optuna_storage(storage),
        mlflow_store(storage),
        data_folder(machine),
    ]


def worst(checks: list[Check]) -> str:
    """Return the worst status of some checks."""
    return max((check.status for check in checks), key=STATUSES.index)


def versions(machine: Machine) -> Check:
    """Check that the packages are installed, and report their versions."""
    parts = [f"lit_dps {__version__}", f"Python {platform.python_version()}"]
    missing = []
    for name in PACKAGES:
        try:
            parts.append(f"{name} {machine.version_of(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        remedy = f"install {', '.join(missing)}, or lit_dps again"
        return Check("versions", ERROR, f"{', '.join(missing)} missing", remedy)
    return Check("versions", OK, ", ".join(parts))


def processors(machine: Machine) -> Check:
    """Report the cores that may be used, and warn if a container allows fewer."""
    usable = machine.cores()
    quota = cpu_quota(machine.cgroup)
    threads = machine.environment.get("OMP_NUM_THREADS")
    text = f"{usable} of {machine.all_cores() or usable} usable by this process"
    if threads is not None:
        text += f", OMP_NUM_THREADS = {threads}"
    if quota is None or quota >= usable:
        return Check("cores", OK, text)
    workers = max(1, math.floor(quota))
    return Check(
        "cores",
        WARNING,
        f"{text}; its container allows the time of {quota:g}",
        f"set --study.workers {workers}",
    )


def cpu_quota(cgroup: Path) -> float | None:
    """Return the cores that a container may use, in core time; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory(machine: Machine) -> Check:
    """Report the available memory, within the limit of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _available_bytes()
    limit = _number_in(machine.cgroup / "memory.max")
    text = f"{total / GIB:.1f} GiB"
    if limit is not None and limit < total:
        text += f", {limit / GIB:.1f} GiB allowed by its container"
        available = min(available, limit - _used_bytes(machine.cgroup))
    if math.isinf(available):
        return Check("memory", OK, text)
    text += f", {available / GIB:.1f} GiB available"
    if available < MIN_MEMORY_GIB * GIB:
        return Check("memory", WARNING, text, "end other programs, or set --study.workers 1")
    return Check("memory", OK, text)


def _available_bytes() -> float:
    """Return the memory that Linux reports as available; infinite on other systems."""
    kibibytes = _entry_in(Path("/proc/meminfo"), "MemAvailable:")
    return math.inf if kibibytes is None else kibibytes * 1024.0


def _used_bytes(cgroup: Path) -> float:
    """Return the memory of a container, without the page cache that it can give back."""
    used = _number_in(cgroup / "memory.current") or 0.0
    cache = _entry_in(cgroup / "memory.stat", "inactive_file ") or 0.0
    return max(used - cache, 0.0)


def _entry_in(file: Path, name: str) -> float | None:
    """Return the number after a name in a file; None without a file or a number."""
    try:
        (line,) = [line for line in file.read_text().splitlines() if line.startswith(name)]
        return float(line.split()[1])
    except (OSError, ValueError):
        return None


def _number_in(file: Path) -> float | None:
    """Return the number in a file; None without a file or a number."""
    try:
        return float(file.read_text())
    except (OSError, ValueError):
        return None


def gpus(machine: Machine) -> list[Check]:
    """Import PyTorch, and report each GPU with its memory and bf16 support."""
    try:
        torch = machine.import_torch()
    except Exception as error:
        return [Check("GPU", ERROR, f"PyTorch cannot be imported: {error}", "install torch again")]
    built_for = torch.version.cuda
    if not torch.cuda.is_available():
        if built_for is None:
            return [Check("GPU", OK, "none; this PyTorch is built for CPUs")]
        text = f"none is visible to PyTorch (built for CUDA {built_for}); trials train on the CPU"
        is_hidden = machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if machine.nvidia_device.exists() and not is_hidden:
            remedy = f"install a driver for CUDA {built_for}, or a PyTorch for the driver"
            return [Check("GPU", WARNING, f"this machine has one, but {text}", remedy)]
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
    problem = _why_not_writable(folder)
    if problem:
        return Check(name, ERROR, f"{folder}: {problem}", remedy)
    text = str(folder) if folder.exists() else f"{folder} (will be created)"
    free = shutil.disk_usage(nearest_existing(folder)).free / GIB
    text += f", {free:.1f} GiB free"
    if free < MIN_DISK_GIB:
        return Check(name, WARNING, text, "free some space")
    return Check(name, OK, text)


def _why_not_writable(folder: Path) -> str:
    """Return why files cannot be created in a folder; empty if they can.

    The folder need not exist.
    """
    try:
        existing = nearest_existing(folder.absolute())
        is_folder = existing.is_dir()
    except OSError as error:  # below a folder that may not be entered
        return str(error.strerror or error).lower()
    if not is_folder:
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return ""


def _why_no_database(file: Path) -> str:
    """Return why a sqlite file cannot be written; empty if it can. The file need not exist."""
    # Sqlite writes its journal beside the file.
    problem = _why_not_writable(file.parent)
    if not problem and file.is_dir():
        return f"{file} is a folder"
    if not problem and file.exists() and not os.access(file, os.R_OK | os.W_OK):
        return f"{file} is not writable"
    return problem


def optuna_storage(storage: StorageConfig) -> Check:
    """Check that the studies of the Optuna storage can be read, and that its file can be written.

    A server is asked for its studies only.
    """

    def count(url: str) -> str:
        from lit_dps.storage.read import list_studies  # imports Optuna, which may be missing

        studies = len(list_studies(url))
        return "1 study" if studies == 1 else f"{studies} studies"

    remedies = (
        "choose another --storage.optuna",
        "check --storage.optuna, and that its server runs",
    )
    return _database("Optuna", storage.optuna_url, count, ERROR, remedies)


def mlflow_store(storage: StorageConfig) -> Check:
    """Check that MLflow's tracking store answers. A study runs without it, so this is a warning."""

    def count(uri: str) -> str:
        from lit_dps.tracking.client import experiments  # imports MLflow, which may be missing

        return counted(len(experiments(uri)), "experiment")

    remedy = "a study runs without it; check --storage.mlflow"
    return _database("MLflow", storage.mlflow_uri, count, WARNING, (remedy, remedy))


def _database(
    name: str, url: str, count: Callable[[str], str], level: str, remedies: tuple[str, str]
) -> Check:
    """Return the check of a database.

    Args:
        name: What it belongs to.
        url: Its address.
        count: Reads it, and returns how many entries it has as text.
        level: How bad a database is that cannot be used.
        remedies: What to do with a file that cannot be used, and with a database that fails.
    """
    shown = without_password(url)
    file = sqlite_file(url)
    if file is not None:
        problem = _why_no_database(Path(file))
        if problem:
            return Check(name, level, f"{shown}: {problem}", remedies[0])
        if not Path(file).is_file():
            return Check(name, OK, f"{shown} (will be created)")
    try:
        entries = count(url)
    except (UserError, ImportError) as error:
        return Check(name, level, scrubbed(" ".join(str(error).split()), url), remedies[1])
    return Check(name, OK, f"{shown}, {entries}")


def data_folder(machine: Machine) -> Check:
    """Report the folder of the image data sets, which the package's own data modules read."""
    given = machine.environment.get(ENV)
    folder = data_root(given)
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # below a folder that may not be entered
        return Check("data folder", WARNING, f"{folder}: {error.strerror}", f"set {ENV}")
    if is_folder:
        return Check("data folder", OK, str(folder))
    if given:
        remedy = f"create it, or set {ENV} to another folder"
        return Check("data folder", WARNING, f"{ENV} = {given} does not exist", remedy)
    return Check("data folder", OK, f"{folder} does not exist; digits and your data need none")


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
