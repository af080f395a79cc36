"""Checks the shape of a configuration before PyTorch is imported: files that parse, and values of the right kind.

What a section takes is read from source. jsonargparse checks the rest, in words of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.cli.keys import annotations
from lit_dps.cli.shipped import how_to_get
from lit_dps.errors import ConfigError, UserError, shortened

MAPPING, LIST, TEXT, NUMBER, BOOL, NULL, ANY = "mapping", "list", "text", "number", "bool", "null", "any"
WORDS = {
    MAPPING: "keys with values, such as {key: value}",
    LIST: "a list, such as [1, 2]",
    TEXT: "a text",
    NUMBER: "a number",
    BOOL: "true or false",
    NULL: "null",
}
# Annotations by their last name; of all others any value is taken.
_KINDS = {
    **dict.fromkeys(("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "set"), LIST),
    **dict.fromkeys(("dict", "Dict", "Mapping"), MAPPING),
    **dict.fromkeys(("int", "float"), NUMBER),
    **{"str": TEXT, "bool": BOOL, "None": NULL},
}
CLASSES = ("model", "data")


def check_shape(argv: list[str], verb: str) -> None:
    """Check the configuration files and options of a command.

    Args:
        argv: The command line without its verb.
        verb: The verb.

    Raises:
        UserError: for a file that is not there or does not parse, with its line and column.
        ConfigError: for a value of another kind than its key takes.
    """
    known = annotations()
    for key, value in _given(argv, verb):
        section, _, name = key.partition(".")
        if section in CLASSES and not name:
            _check_class(section, value)
        elif not name and section in known:
            _check_section(section, value, known[section])
        elif name in known.get(section, {}):
            _check(key, value, known[section][name])


def _given(argv: list[str], verb: str) -> Iterator[tuple[str, Any]]:
    """The sections of the configuration files of a command, and its options below a section."""
    for i, option in enumerate(argv):
        name, equals, text = option.partition("=")
        if not equals:
            text = "".join(argv[i + 1 : i + 2])
        if name in ("--config", "-c"):
            yield from load(text, verb).items()
        elif name.startswith("--") and name.count(".") == 1 and not name.endswith(("+", ".help")):
            try:
                yield name[2:], yaml.safe_load(text)
            except yaml.YAMLError:
                continue


def load(file: str, verb: str) -> dict[str, Any]:
    """Return the sections of a configuration file; none of what is no file but a configuration itself.

    Raises:
        UserError: if the file is not there or does not parse.
    """
    path = Path(file)
    try:
        if not path.is_file():
            if ":" not in file and "\n" not in file:
                raise UserError(f"{verb}: no such file {file!r}{how_to_get(file)}")
            return {}
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no text in UTF-8, or no name of a file
        return {}
    except yaml.YAMLError as error:
        raise UserError(f"{file}{_place(error)}: {_problem(error)}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        shown = shortened(repr(found))
        raise UserError(f"{file}: {shown} is no configuration; keys such as model, data and study are needed")
    return {key: value for key, value in found.items() if isinstance(key, str)}


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _problem(error: yaml.YAMLError) -> str:
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{shortened(said)}; it is not valid YAML: look at this line and the one before"


def _check_class(section: str, value: Any) -> None:
    """Check a section that names a class and its arguments."""
    if isinstance(value, str) or value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(section, value, "class_path and init_args expected")
    path, arguments = value.get("class_path", ""), value.get("init_args")
    if not isinstance(path, str):
        raise ConfigError(f"{section}.class_path", path, "the path of a class expected, such as mymodule.MyClass")
    if not isinstance(arguments, (Mapping, type(None))):
        raise ConfigError(f"{section}.init_args", arguments, "the arguments of the class by name expected")


def _check_section(section: str, value: Any, known: Mapping[str, str]) -> None:
    if isinstance(value, str) and Path(value).suffix in (".yaml", ".yml"):  # a file beside this one
        return
    if not isinstance(value, Mapping):
        names = ", ".join(list(known)[:3])
        raise ConfigError(section, value, f"keys with values expected, such as {names}; or leave it out")
    for name, each in value.items():
        if name in known:
            _check(f"{section}.{name}", each, known[name])


def _check(key: str, value: Any, annotation: str) -> None:
    """Raise ConfigError if an annotation takes no value of this kind."""
    if not _fits(value, ast.parse(annotation, mode="eval").body):
        kinds = sorted(_kinds(ast.parse(annotation, mode="eval").body), key=list(WORDS).index)
        shown = "***" if key.startswith("storage.") else value
        raise ConfigError(key, shown, f"{' or '.join(WORDS[kind] for kind in kinds)} expected{_of(annotation)}")


def _of(annotation: str) -> str:
    """What the values of a list or a mapping have to be; empty where that is not known."""
    for each in _alternatives(ast.parse(annotation, mode="eval").body):
        inner = _inner(each, -1) if _kinds(each) <= {LIST, MAPPING} else None
        kinds = set() if inner is None else _kinds(inner) - {ANY}
        if kinds:
            words = [WORDS[kind].partition(",")[0] for kind in sorted(kinds, key=list(WORDS).index)]
            return f"; each value is {' or '.join(words)}"
    return ""


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The members of a union; the annotation itself where it is none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    if isinstance(node, ast.Subscript) and _name(node.value) in ("Union", "Optional"):
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        found = [each for member in members for each in _alternatives(member)]
        return [*found, ast.Constant(None)] if _name(node.value) == "Optional" else found
    return [node]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return getattr(node, "id", getattr(node, "attr", ""))


def _kinds(node: ast.expr) -> set[str]:
    """The kinds of values that an annotation takes."""
    found = set()
    for each in _alternatives(node):
        if isinstance(each, ast.Subscript):
            each = each.value
        found.add(_KINDS.get(_name(each), ANY))
    return found


def _fits(value: Any, node: ast.expr) -> bool:
    """Return False if a value is surely not what an annotation takes."""
    kinds = _kinds(node)
    if ANY in kinds:
        return True
    if isinstance(value, str) and kinds & {LIST, MAPPING} and value.lstrip()[:1] in ("[", "{"):
        return True  # jsonargparse reads it
    if isinstance(value, list):
        inner = [_inner(each, -1) for each in _alternatives(node) if _kinds(each) == {LIST}]
        return bool(inner) and any(all(each is None or _fits(x, each) for x in value) for each in inner)
    if isinstance(value, Mapping):
        inner = [_inner(each, -1) for each in _alternatives(node) if _kinds(each) == {MAPPING}]
        return bool(inner) and any(all(each is None or _fits(x, each) for x in value.values()) for each in inner)
    if value is None:
        return NULL in kinds
    if isinstance(value, bool):
        return bool(kinds & {BOOL, TEXT})
    if isinstance(value, (int, float)):
        return bool(kinds & {NUMBER, TEXT, BOOL})
    return TEXT in kinds or _is_other_scalar(str(value), kinds)


def _inner(node: ast.expr, index: int) -> ast.expr | None:
    """What the annotation of a list or a mapping says of its values; None if it says nothing."""
    if not isinstance(node, ast.Subscript):
        return None
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if _name(members[index]) == "Ellipsis":
        return members[0]
    return members[index]


def _is_other_scalar(text: str, kinds: set[str]) -> bool:
    """Return True if a text may be read as a number, which YAML takes 1e-3 not to be, or as another value."""
    if NUMBER in kinds:
        try:
            float(text)
            return True
        except ValueError:
            pass
    return (BOOL in kinds and text.lower() in ("true", "false", "yes", "no")) or (NULL in kinds and text == "null")
