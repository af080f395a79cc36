"""The user's code: files and modules outside installed packages, the standard library, lit_dps."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


def _process_start() -> float:
    """Return when this process began; outside Linux, when it imported lit_dps."""
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(stat[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, ValueError, AttributeError):
        return time.time()


PROCESS_START = _process_start()


def texts_in(nested: Any) -> Iterator[str]:
    """Yield the texts among the values of a nested configuration, which may be class paths."""
    if isinstance(nested, str):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from texts_in(value)
    elif isinstance(nested, (list, tuple)):
        for value in nested:
            yield from texts_in(value)


def is_user_module(name: str) -> bool:
    """Return True for a module of the user, by name; also for one that a notebook makes."""
    top = name.split(".")[0]
    for each in (name, top):
        file = getattr(sys.modules.get(each), "__file__", None)
        if isinstance(file, str):
            return is_user_file(file)
    return top not in sys.stdlib_module_names


@cache
def _installed() -> tuple[str, ...]:
    """Return the folders of installed packages, of the standard library and of lit_dps."""
    folders = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [site.getusersitepackages(), str(Path(__file__).parent.parent)]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


@cache
def _installed_with_target() -> tuple[str, ...]:
    """Return the folders and files of packages that `pip install --target` put on the import path.

    Other files in the same folder may be the user's.
    """
    paths = set()
    for folder in sys.path:
        if _PACKAGE_FOLDERS & {*Path(os.path.realpath(folder)).parts}:
            continue  # all its files count as installed anyway, and their lists take seconds
        for info in Path(folder or ".").glob("*.dist-info"):
            for file in PathDistribution(info).files or ():
                first = file.parts[0]
                if first in ("..", info.name):
                    continue
                path = os.path.realpath(info.with_name(first))
                is_package = len(file.parts) > 1
                paths.add(path + os.sep if is_package else path)
    return tuple(sorted(paths))


def is_installed(module: ModuleType | None) -> bool:
    """Return True if a module is of an installed package other than lit_dps."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and _is_in_package_folder(os.path.realpath(file))


@cache
def is_user_file(file: str) -> bool:
    """Return True for a file outside installed packages, the standard library and lit_dps."""
    path = os.path.realpath(file)
    return not path.startswith(_installed()) and not _is_in_package_folder(path)


def _is_in_package_folder(path: str) -> bool:
    return bool(_PACKAGE_FOLDERS & {*Path(path).parts}) or path.startswith(_installed_with_target())
