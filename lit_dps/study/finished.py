"""Repeats the result of a finished study at once, if nothing has changed since the same command.

A command needs seconds to import PyTorch and the user's classes and to read the data, even if no
trials remain. So a finished study writes a note `.finished` beside its files. The note contains the
command, each file that Python read or imported, and the state of the stored study. If all of these
are unchanged, the result is unchanged too. Otherwise the command runs as usual. The note misses
files that a C library opens; `lit_dps.data` opens all of its files in Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import sys
from pathlib import Path

import yaml

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.atomic_write import replacing
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.report.no_result import NO_RESULT, ended_without_result
from lit_dps.report.publish import figures_folder, publish, source_of
from lit_dps.report.text import parts_of
from lit_dps.storage.own_studies import own_studies_file
from lit_dps.storage.read import read_study
from lit_dps.storage.urls import sqlite_file

NOTE = ".finished"
WIDEN = "--extend-space"
TIME_STEPS = "--time-steps"
# These options only change what is printed.
SHOW = "--show"
VALIDATE_EVERY = "--validate-every"
ENVIRONMENT = ("LIT_DPS_DATA", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
_watched: tuple[str, set[str]] | None = None  # hash of the command, and the files opened since


def watch(argv: list[str]) -> None:
    """Begin to record the files that this process opens for a command."""
    global _watched
    if _watched is None:
        sys.addaudithook(_opened)  # Python cannot remove an audit hook
    _watched = _hash(_without_print_options(argv)[0]), set()


def _opened(event: str, arguments: tuple) -> None:
    if event == "open" and _watched is not None:
        path, mode, _ = arguments
        if isinstance(path, (str, os.PathLike)) and (mode is None or "r" in mode):
            _watched[1].add(os.path.abspath(path))


def _hash(argv: list[str]) -> str:
    asked = [argv, os.getcwd(), sys.version, {key: os.environ.get(key) for key in ENVIRONMENT}]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def keep(storage: StorageConfig, record: StudyRecord, pages: str) -> None:
    """Write a note that no trials of the watched command remain.

    Args:
        storage: The storage of the study.
        record: The stored study.
        pages: The printed lines that say where MLflow shows the study.
    """
    if _watched is None:
        return
    written = _written(storage, record)
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {}
    for path in sorted(filter(None, _watched[1] | modules)):
        if written.match(path) or "__pycache__" in path:
            continue
        state = _stat(path)
        if state:
            files[path] = state
    note = {"command": _watched[0], "files": files, "source": source_of(record), "pages": pages}
    with replacing(figures_folder(storage.folder, record.name) / NOTE) as temporary:
        temporary.write_text(json.dumps(note), encoding="utf-8")


def _written(storage: StorageConfig, record: StudyRecord) -> re.Pattern[str]:
    """Return a pattern of paths that change without a change of the command.

    These are the files that a study writes, and the kernel's files. Other files in the storage
    folder may be configuration, modules or data, so the pattern does not match them.
    """
    folders = [
        figures_folder(storage.folder, record.name),
        Path(storage.folder, "artifacts", record.workload),
    ]
    folders += [
        storage.checkpoints(record.name),
        storage.failures(record.name),
        Path("/proc"),
        Path("/sys"),
    ]
    databases = filter(None, map(sqlite_file, (storage.optuna_url, storage.mlflow_uri)))
    patterns = [f"{_escaped(folder)}/.*" for folder in folders]
    patterns.append(_escaped(own_studies_file()))  # every new study adds a line
    for file in databases:
        patterns.append(rf"{_escaped(file)}(-journal|-wal|-shm|.*\.lock|\.workers(/.*)?)?")
    return re.compile(f"({'|'.join(patterns)})$", re.DOTALL)


def _escaped(path: Path) -> str:
    return re.escape(os.path.abspath(path))


def repeat(argv: list[str]) -> int | None:
    """Print the result of a finished study, if it is unchanged.

    Returns:
        The exit code; None if nothing was printed, so that the command has to run.

    Raises:
        ConfigError: if the command asks to show an unknown part.
    """
    argv, options = _without_print_options(argv)
    show = parts_of(options.get(SHOW, ""))
    if WIDEN in argv or TIME_STEPS in argv:  # these options always need a run
        return None
    try:
        study, storage = _asked(argv)
        folder = figures_folder(storage.folder, study)
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        logged = sqlite_file(storage.mlflow_uri)
        if note["command"] != _hash(argv):
            return None
        if any(_stat(path) != state for path, state in note["files"].items()):
            return None
        if logged is not None and not logged.is_file():
            return None
        record = read_study(storage.optuna_url, study)
        if source_of(record) != note["source"]:
            return None
        validate_every = int(options[VALIDATE_EVERY]) if VALIDATE_EVERY in options else None
        if validate_every is not None and validate_every < 1:
            return None  # the command refuses this value
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StorageError, yaml.YAMLError):
        return None
    analysis = Analysis(record, validate_every=validate_every)
    text, _ = publish(analysis, folder, show)
    print(f"study {study}: nothing left to run", file=sys.stderr, flush=True)
    print(f"\n{text}\n{note['pages']}", flush=True)
    return NO_RESULT if ended_without_result(analysis.cells) else 0


def _without_print_options(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command without the options that only change what is printed, and their values by
    name."""
    rest: list[str] = []
    options: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, equals, given = word.partition("=")
        if name in (SHOW, VALIDATE_EVERY):
            options[name] = given if equals else next(words, "")
        else:
            rest.append(word)
    return rest, options


def _stat(path: str) -> list[int] | None:
    """Return size and time of a file or folder; None for a missing file and for a device."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return None
    return [status.st_size, status.st_mtime_ns]


def _asked(argv: list[str]) -> tuple[str, StorageConfig]:
    """Return the name of a command's study, and its storage, without parsing the full
    configuration."""
    sections = {"study": {}, "storage": {}}
    for i, option in enumerate(argv):
        name, equals, value = option.partition("=")
        value = value if equals else "".join(argv[i + 1 : i + 2])
        if name in ("--config", "-c"):
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            for section in sections:
                sections[section] |= content.get(section) or {}
        section, _, key = name.removeprefix("--").partition(".")
        if section in sections and key:
            sections[section][key] = value
    return sections["study"].get("name", StudyConfig.name), StorageConfig(**sections["storage"])
