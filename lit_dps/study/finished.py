"""Says at once that a study has nothing left to run, where nothing has changed since the same command said so.

To know what a command asks for takes PyTorch, the user's classes and the data: seconds, to find that nothing is left.
So, as make does, it is noted beside the study's files, in `.finished`: the command, every file that Python read or
imported to find out, and the study as it was stored. Where all of these are as they were, so is the answer. Where
anything is not, or cannot be told, the long way is taken, which needs no note. A file that a library in C reads by
itself is not seen: `lit_dps.data` opens all of its own.
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

from lit_dps.analysis import (
    NO_RESULT,
    Analysis,
    ended_without_result,
    figures_folder,
    parts_of,
    publish,
    source_of,
)
from lit_dps.config import StorageConfig, StudyConfig
from lit_dps.errors import StorageError
from lit_dps.files import replacing
from lit_dps.record import StudyRecord
from lit_dps.store import read_study, sqlite_file
from lit_dps.store.trust import own_studies_file

NOTE = ".finished"
WIDEN = "--extend-space"
TIME_STEPS = "--time-steps"
# These options change what is printed, and nothing else
SHOW = "--show"
VALIDATE_EVERY = "--validate-every"
ENVIRONMENT = ("LIT_DPS_DATA", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
_watched: tuple[str, set[str]] | None = None  # the command, by its hash, and the files that were opened since


def watch(argv: list[str]) -> None:
    """Begins to note the files that this process opens, on behalf of a command."""
    global _watched
    if _watched is None:
        sys.addaudithook(_opened)  # for good: there is no way to take one away
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
    """Notes that the command which is watched has nothing left to run, and where its study is seen in MLflow."""
    if _watched is None:
        return
    own = _written(storage, record)
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    files = {path for path in (*_watched[1], *modules) if path and not own.match(path)}
    known = {path: found for path in sorted(files) if "__pycache__" not in path and (found := _stat(path))}
    note = {"command": _watched[0], "files": known, "source": source_of(record), "pages": pages}
    with replacing(figures_folder(storage.folder, record.name) / NOTE) as temporary:
        temporary.write_text(json.dumps(note), encoding="utf-8")


def _written(storage: StorageConfig, record: StudyRecord) -> re.Pattern[str]:
    """The paths of what a study writes itself, and of the kernel's files: they change while what it asks does not.

    Not all of the storage folder, in which configuration, modules and data may lie too.
    """
    folders = [figures_folder(storage.folder, record.name), Path(storage.folder, "artifacts", record.workload)]
    folders += [storage.checkpoints(record.name), storage.failures(record.name), Path("/proc"), Path("/sys")]
    databases = filter(None, map(sqlite_file, (storage.optuna_url, storage.mlflow_uri)))
    own = [f"{re.escape(os.path.abspath(folder))}/.*" for folder in folders]
    own.append(re.escape(os.path.abspath(own_studies_file())))  # every new study adds a line
    own += [rf"{re.escape(os.path.abspath(file))}(-journal|-wal|-shm|.*\.lock|\.workers(/.*)?)?" for file in databases]
    return re.compile(f"({'|'.join(own)})$", re.DOTALL)


def repeat(argv: list[str]) -> int | None:
    """Prints what the command said when it ended, if it would say it again.

    Returns:
        The exit code; None if it printed nothing, so that the command has to run.

    Raises:
        ConfigError: if it asks to show what there is not.
    """
    argv, options = _without_print_options(argv)
    show = parts_of(options.get(SHOW, ""))
    if WIDEN in argv or TIME_STEPS in argv:  # each time anew
        return None
    try:
        study, storage = _asked(argv)
        folder = figures_folder(storage.folder, study)
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        logged = sqlite_file(storage.mlflow_uri)
        same = note["command"] == _hash(argv) and all(_stat(path) == found for path, found in note["files"].items())
        if not same or not (logged is None or logged.is_file()):
            return None
        record = read_study(storage.optuna_url, study)
        if source_of(record) != note["source"]:
            return None
        validate_every = int(options[VALIDATE_EVERY]) if VALIDATE_EVERY in options else None
        if validate_every is not None and validate_every < 1:
            return None  # the command itself refuses it
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StorageError, yaml.YAMLError):
        return None
    analysis = Analysis(record, validate_every=validate_every)
    text, _ = publish(analysis, folder, show)
    print(f"study {study}: nothing left to run", file=sys.stderr, flush=True)
    print(f"\n{text}\n{note['pages']}", flush=True)
    return NO_RESULT if ended_without_result(analysis.cells) else 0


def _without_print_options(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command without the options that only change what is printed, and their values by name."""
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
    """Size and time of a file or folder; None for what is not there, and for devices, which are never as they were."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return None
    return [found.st_size, found.st_mtime_ns]


def _asked(argv: list[str]) -> tuple[str, StorageConfig]:
    """The study that a command names, and its storage, as far as the plain reading of a command goes."""
    found = {"study": {}, "storage": {}}
    for i, option in enumerate(argv):
        name, equals, value = option.partition("=")
        value = value if equals else "".join(argv[i + 1 : i + 2])
        if name in ("--config", "-c"):
            content = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
            for section in found:
                found[section] |= content.get(section) or {}
        section, _, key = name.removeprefix("--").partition(".")
        if section in found and key:
            found[section][key] = value
    return found["study"].get("name", StudyConfig.name), StorageConfig(**found["storage"])
