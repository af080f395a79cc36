"""Hashes of the user's code: of each imported file outside installed packages and lit_dps."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from lit_dps.core.environment import FORMER_SOURCE, UNKNOWN, is_same_source
from lit_dps.core.errors import UserError
from lit_dps.core.identity import OBJECTS
from lit_dps.core.record import setting
from lit_dps.core.user_code import is_user_file, texts_in
from lit_dps.training.code_tree import strip_docstrings
from lit_dps.training.object_paths import MAIN
from lit_dps.training.user_objects import hashes_of_class

LENGTH = 16  # hexadecimal digits of a hash
MACHINE_MODULES = ("sitecustomize", "usercustomize")  # they differ between installations
# Prefixes of class paths that only the script or notebook can import that runs lit_dps.
_LOCAL = (f"{MAIN[0]}.", f"{OBJECTS}.")


def source_hashes(config: Any, is_start: bool = False) -> dict[str, list[str]]:
    """Return the hashes of all files of the user's code that this process has imported.

    The first hash is of the file's bytes. The second is of its syntax tree without docstrings and
    without blocks below `if __name__ == "__main__"`. So comments and formatting do not change the
    second hash. From a script or a notebook, each class and function that the configuration names
    is hashed, with the functions, classes and values of the script that its code reads. These
    hashes stay the same until `is_start`, because values may change in training.

    Args:
        config: The nested configuration, whose texts may be class paths.
        is_start: Whether a command starts.

    Returns:
        Hashes by file name, such as my_code.py or package/model.py, or by path, such as
        `__main__.Net`; `UNKNOWN` for a value that cannot be compared.
    """
    if is_start:
        _hashes_of_local.cache_clear()
    hashes = {}
    figures: Any = setting(config, "study.figures") or ()  # they change no trial
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in (*MAIN, *MACHINE_MODULES, *figures) or not isinstance(file, str):
            continue
        # torch makes modules without a file.
        if is_user_file(file) and os.path.isfile(file):
            hashes[_place_of(name, Path(file))] = _hashes_of_file(file)
    for text in texts_in(config):
        if text.startswith(_LOCAL):
            hashes |= _hashes_of_local(text)
    return dict(sorted(hashes.items()))


def _place_of(module: str, file: Path) -> str:
    """Return the name of a module's file, such as my_code.py or package/__init__.py."""
    place = module.replace(".", "/")
    if file.stem == "__init__":
        return f"{place}/{file.name}"
    return place + file.suffix


def import_sources(config: Any, sources: Mapping[str, Any]) -> None:
    """Import the user's modules that a configuration names, so that `source_hashes` has them.

    Args:
        config: The configuration, nested, whose texts may be class paths.
        sources: Hashes of another process: modules that it had not imported are skipped.
    """
    for text in sorted(set(texts_in(config))):
        module = text.rpartition(".")[0]
        place = module.replace(".", "/")
        if f"{place}.py" in sources or f"{place}/__init__.py" in sources:
            importlib.import_module(module)


def changed_files(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the files in both mappings whose content differs."""
    names = [name for name in one if name in other]
    return [name for name in names if not is_same_source(one[name], other[name])]


def refuse_changed_sources(began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a file of the user's code has other content than when the command began.

    A process that imports the file now would train other code than the trials are stored with.
    """
    changed = changed_files(began, now)
    if not changed:
        return
    hint = "Finish your edits, then start the command again."
    if any(name.startswith(_LOCAL) for name in changed):
        hint += (
            ' Workers run the script without its block `if __name__ == "__main__"`: set the values '
            "of your classes above it, or use one worker."
        )
    raise UserError(f"{', '.join(changed)} changed while the command ran. {hint}", value=changed)


def _hashes_of_file(file: str) -> list[str]:
    try:
        stat = os.stat(file)
        return _hashes(file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return UNKNOWN


@cache
def _hashes_of_local(path: str) -> dict[str, list[str]]:
    """Return the hashes of a class, a third one as in earlier versions, and of what it reads."""
    hashes = hashes_of_class(path)
    former = _former_hash(path)
    if former and len(hashes.get(path, ())) == FORMER_SOURCE:
        hashes[path] = [*hashes[path], former]
    return hashes


def _former_hash(path: str) -> str:
    """Return the hash that earlier versions stored for a class; without what its code reads."""
    kind = getattr(sys.modules["__main__"], path.removeprefix(f"{MAIN[0]}."), None)
    if kind is None:
        return ""
    with suppress(OSError, TypeError, SyntaxError):
        return _digest(_tree_of_object(kind))
    # Some notebooks know the sources of methods, but not of classes.
    trees = []
    for member in vars(kind).values():
        if inspect.isfunction(member):
            try:
                trees.append(_tree_of_object(member))
            except (OSError, TypeError, SyntaxError):
                return ""
    return _digest(b"\n".join(trees)) if trees else ""


def _tree_of_object(item: Any) -> bytes:
    """Return the syntax tree of a class or a function, as `_tree`."""
    return _tree(textwrap.dedent(inspect.getsource(item)))


@cache
def _hashes(file: str, modified: int, size: int) -> list[str]:
    content = Path(file).read_bytes()
    hashes = [_digest(content)]
    with suppress(SyntaxError, ValueError):  # compiled code
        hashes.append(_digest(_tree(content)))
    return hashes


def _tree(source: str | bytes) -> bytes:
    """Return the syntax tree of a source as bytes, without docstrings and script blocks."""
    tree = ast.parse(source)
    strip_docstrings(tree)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [statement for statement in body if not _is_script(statement)]
    return ast.dump(tree).encode()


def _is_script(statement: ast.stmt) -> bool:
    """Return True for a block `if __name__ == "__main__"`."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:LENGTH]
