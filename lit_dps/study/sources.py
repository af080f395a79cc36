"""Hashes of the user's code, and of the files that the configuration of the model names.

The code is each imported file outside installed packages and lit_dps.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lit_dps.core.environment import FILE, SOURCES, UNKNOWN, changes_since
from lit_dps.core.errors import UserError
from lit_dps.core.identity import local_classes
from lit_dps.core.record import setting
from lit_dps.core.user_code import PROCESS_START, is_user_file, texts_in
from lit_dps.study.script_code import hashes_of_paths
from lit_dps.training.code_text import function_of_member, is_edited

LENGTH = 16  # hexadecimal digits of a hash
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The script, which workers import under another name, and files that installations differ in.
_SKIPPED = ("__main__", "__mp_main__", "sitecustomize", "usercustomize")
_hashes_of_local = cache(hashes_of_paths)
_seen: dict[str, list[str]] = {}  # hashes of these files when the command began


def source_hashes(config: Any, is_start: bool = False) -> dict[str, list[str]]:
    """Return the hashes of all files of the user's code that this process has imported.

    The first hash is of the file's bytes. The second is of its syntax tree without docstrings and
    without blocks below `if __name__ == "__main__"`. So comments and formatting do not change the
    second hash. From a script or a notebook, each class and function that the configuration names
    is hashed, with the functions, classes and constants of the script that its code names. These
    hashes stay the same until `is_start`. Files that the model's arguments name, such as a
    checkpoint, have one hash. It is `UNKNOWN` if the file changes after the command began: the
    model may write it.

    Args:
        config: The nested configuration, whose texts may be class paths.
        is_start: Whether a command starts.

    Returns:
        Hashes by file name, such as my_code.py or package/model.py, or by path, such as
        `__main__.Net`, or such as "file dense.ckpt" for an argument of the model. `UNKNOWN` for a
        constant that code assigns.

    Raises:
        UserError: if a command starts after an imported file was edited.
    """
    if is_start:
        _hashes_of_local.cache_clear()
        _seen.clear()
    hashes: dict[str, list[str]] = {}
    texts = list(texts_in(config))
    figures = _figures(config, texts)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in (*_SKIPPED, *figures) or not isinstance(file, str):
            continue
        # torch makes modules without a file.
        if is_user_file(file) and os.path.isfile(file):
            if is_start:
                _refuse_edited(module)
            hashes[_place_of(name, Path(file))] = _hashes_of_file(file)
    for argument in _arguments_of_model(config):
        _seen.setdefault(argument, [_content_of(argument)])
    hashes |= _file_hashes()
    hashes |= _hashes_of_local(tuple(local_classes(config)))
    return dict(sorted(hashes.items()))


def written_files() -> list[str]:
    """Return the names of the model's files that changed after the command began."""
    return [name for name, hashes in _file_hashes().items() if hashes == UNKNOWN]


def _file_hashes() -> dict[str, list[str]]:
    """Return the hashes of the files that the model's arguments name; `UNKNOWN` of changed ones."""
    for argument, hashes in _seen.items():
        if hashes not in (UNKNOWN, [_content_of(argument)]):
            _seen[argument] = UNKNOWN
    return {FILE + argument: hashes for argument, hashes in _seen.items() if hashes != [""]}


def _arguments_of_model(config: Any) -> Iterator[str]:
    """Yield the texts that arguments of the model have: configured, searched, or by default."""
    parts = [setting(config, "model")]
    for section in ("study.grid", "study.space"):
        values: Any = setting(config, section) or {}
        parts += [value for key, value in values.items() if key.startswith("model.")]
    for text in texts_in(parts):
        yield text
        module, _, name = text.rpartition(".")
        cls = getattr(sys.modules.get(module), name, None)
        if isinstance(cls, type):
            for parameter in inspect.signature(cls.__init__).parameters.values():
                if isinstance(parameter.default, (str, Path)):
                    yield str(parameter.default)


def _figures(config: Any, texts: list[str]) -> set[str]:
    """Return the modules of figures that change no trial: they have no class of a trial."""
    figures: Any = setting(config, "study.figures") or ()
    return {name for name in figures if not any(text.startswith(f"{name}.") for text in texts)}


def _refuse_edited(module: ModuleType) -> None:
    """Raise UserError if a loaded function or method of a module differs from its file."""
    # Another loader, or a decorator, may change the code of the file.
    if type(getattr(module, "__loader__", None)) is not SourceFileLoader:
        return
    for function in _functions_of(module):
        code = function.__code__
        file = code.co_filename
        if function.__name__ == "<lambda>" or not is_user_file(file) or not os.path.isfile(file):
            continue
        if os.path.getmtime(file) >= PROCESS_START and is_edited(code):
            raise UserError(
                f"{file} changed after it was imported: {function.__qualname__} differs. Reload "
                "the module, or restart the script or notebook.",
                value=file,
            )


def _functions_of(owner: Any) -> Iterator[FunctionType]:
    """Yield the functions of a module, and the methods and properties of its classes."""
    for member in list(vars(owner).values()):
        if isinstance(member, type):
            if isinstance(owner, ModuleType):
                yield from _functions_of(member)
            continue
        function = function_of_member(member)
        if function is not None:
            yield function


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


def refuse_changed_sources(began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a file of the user's code has other content than when the command began.

    A process that imports the file now would train other code than the trials are stored with.
    """
    changed = changed_code(began, now)
    if changed:
        raise UserError(
            f"{', '.join(changed)} changed while the command ran. Finish your edits, then start "
            "the command again.",
            value=changed,
        )


def changed_code(began: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the code that differs in two mappings of hashes, as `changes_since` names it.

    A file of the model's arguments does not count, because trials may write it.
    """
    code = {name: hashes for name, hashes in began.items() if not name.startswith(FILE)}
    return changes_since([{SOURCES: code}], {SOURCES: now})


def _hashes_of_file(file: str) -> list[str]:
    try:
        stat = os.stat(file)
        return _hashes(file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return UNKNOWN


@cache
def _hashes(file: str, modified: int, size: int) -> list[str]:
    content = Path(file).read_bytes()
    hashes = [_digest(content)]
    with suppress(SyntaxError, ValueError):  # compiled code
        hashes.append(_digest(_tree(content)))
    return hashes


def _content_of(argument: str) -> str:
    """Return the hash of the file that an argument names; "" without a file."""
    with suppress(OSError, ValueError):  # another trial may remove it; a text may be no path
        if os.path.isfile(argument):
            stat = os.stat(argument)
            return _content_hash(argument, stat.st_mtime_ns, stat.st_size)
    return ""


@cache
def _content_hash(file: str, modified: int, size: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:LENGTH]


def _tree(source: str | bytes) -> bytes:
    """Return the syntax tree of a source as bytes, without docstrings and script blocks."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
                del body[0]
            body[:] = [statement for statement in body if not _is_script(statement)]
    return ast.dump(tree).encode()


def _is_script(statement: ast.stmt) -> bool:
    """Return True for a block `if __name__ == "__main__"` without an else."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    test = ast.unparse(statement.test)
    return test in ("__name__ == '__main__'", "'__main__' == __name__")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:LENGTH]
