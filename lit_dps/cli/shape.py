"""Checks that configuration files parse, and that values are of the right kind.

This check needs no PyTorch: it reads the type annotations of each section from the source. Later
jsonargparse checks the rest, with its own messages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.cli.keys import annotations
from lit_dps.cli.shipped import how_to_get
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import shorten

MAPPING, LIST, TEXT, NUMBER, BOOL, NULL, ANY = (
    "mapping",
    "list",
    "text",
    "number",
    "bool",
    "null",
    "any",
)
WORDS = {
    MAPPING: "keys with values, such as {key: value}",
    LIST: "a list, such as [1, 2]",
    TEXT: "a text",
    NUMBER: "a number",
    BOOL: "true or false",
    NULL: "null",
}
# Kind by the last name of an annotation. Any value fits an annotation that is missing here.
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
        UserError: if a file does not exist, or does not parse; with line and column.
        ConfigError: if a value is not of the kind that its key takes.
    """
    known = annotations()
    for key, value in _options_of(argv, verb):
        section, _, name = key.partition(".")
        if section in CLASSES and not name:
            _check_class(section, value)
        elif not name and section in known:
            _check_section(section, value, known[section])
        elif name in known.get(section, {}):
            _check(key, value, known[section][name])


def _options_of(argv: list[str], verb: str) -> Iterator[tuple[str, Any]]:
    """Yield the sections of a command's configuration files, and its options SECTION.NAME."""
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
    """Return the sections of a configuration file; empty if `file` is itself a configuration.

    Raises:
        UserError: if the file does not exist, or does not parse.
    """
    path = Path(file)
    try:
        if not path.is_file():
            if ":" not in file and "\n" not in file:
                raise UserError(f"{verb}: no such file {file!r}{how_to_get(file)}")
            return {}
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the text is not UTF-8, or `file` is no valid file name
        return {}
    except yaml.YAMLError as error:
        raise UserError(f"{file}{_place(error)}: {_problem(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        shown = shorten(repr(content))
        raise UserError(
            f"{file}: {shown} is no configuration; keys such as model, data and study are needed"
        )
    return {key: value for key, value in content.items() if isinstance(key, str)}


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{shorten(problem)}; it is not valid YAML: look at this line and the one before"


def _check_class(section: str, value: Any) -> None:
    """Check a section that names a class and its arguments."""
    if isinstance(value, str) or value is None:
        return
    if not isinstance(value, Mapping):
        raise ConfigError(section, value, "class_path and init_args expected")
    path, arguments = value.get("class_path", ""), value.get("init_args")
    if not isinstance(path, str):
        raise ConfigError(
            f"{section}.class_path", path, "the path of a class expected, such as mymodule.MyClass"
        )
    if not isinstance(arguments, (Mapping, type(None))):
        raise ConfigError(
            f"{section}.init_args", arguments, "the arguments of the class by name expected"
        )


def _check_section(section: str, value: Any, known: Mapping[str, str]) -> None:
    if isinstance(value, str) and Path(value).suffix in (".yaml", ".yml"):  # a file beside this one
        return
    if not isinstance(value, Mapping):
        names = ", ".join(list(known)[:3])
        raise ConfigError(
            section, value, f"keys with values expected, such as {names}; or leave it out"
        )
    for name, each in value.items():
        if name in known:
            _check(f"{section}.{name}", each, known[name])


def _check(key: str, value: Any, annotation: str) -> None:
    """Raise ConfigError if a value does not fit the annotation of its key."""
    node = ast.parse(annotation, mode="eval").body
    if _fits(value, node):
        return
    words = " or ".join(WORDS[kind] for kind in _sorted(_kinds(node)))
    shown = "***" if key.startswith("storage.") else value
    raise ConfigError(key, shown, f"{words} expected{_words_of_items(node)}")


def _words_of_items(node: ast.expr) -> str:
    """Return which values a list or a mapping may contain, in words; "" if that is unknown."""
    for each in _alternatives(node):
        if not _kinds(each) <= {LIST, MAPPING}:
            continue
        inner = _inner(each, -1)
        kinds = set() if inner is None else _kinds(inner) - {ANY}
        if kinds:
            words = [WORDS[kind].partition(",")[0] for kind in _sorted(kinds)]
            return f"; each value is {' or '.join(words)}"
    return ""


def _sorted(kinds: set[str]) -> list[str]:
    return sorted(kinds, key=list(WORDS).index)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the members of a union; the annotation itself if it is no union."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    if isinstance(node, ast.Subscript) and _name(node.value) in ("Union", "Optional"):
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        alternatives = []
        for member in members:
            alternatives += _alternatives(member)
        if _name(node.value) == "Optional":
            alternatives.append(ast.Constant(None))
        return alternatives
    return [node]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return getattr(node, "id", getattr(node, "attr", ""))


def _kinds(node: ast.expr) -> set[str]:
    """Return the kinds of values that an annotation takes."""
    kinds = set()
    for each in _alternatives(node):
        if isinstance(each, ast.Subscript):
            each = each.value
        kinds.add(_KINDS.get(_name(each), ANY))
    return kinds


def _fits(value: Any, node: ast.expr) -> bool:
    """Return False if a value certainly does not fit an annotation."""
    kinds = _kinds(node)
    if ANY in kinds:
        return True
    if isinstance(value, str) and kinds & {LIST, MAPPING} and value.lstrip()[:1] in ("[", "{"):
        return True  # jsonargparse parses it
    if isinstance(value, list):
        return _items_fit(value, node, LIST)
    if isinstance(value, Mapping):
        return _items_fit(list(value.values()), node, MAPPING)
    if value is None:
        return NULL in kinds
    if isinstance(value, bool):
        return bool(kinds & {BOOL, TEXT})
    if isinstance(value, (int, float)):
        return bool(kinds & {NUMBER, TEXT, BOOL})
    return TEXT in kinds or _is_other_scalar(str(value), kinds)


def _items_fit(items: list[Any], node: ast.expr, kind: str) -> bool:
    """Return True if the items fit one of the lists or mappings that an annotation allows."""
    for each in _alternatives(node):
        if _kinds(each) != {kind}:
            continue
        inner = _inner(each, -1)
        if inner is None or all(_fits(item, inner) for item in items):
            return True
    return False


def _inner(node: ast.expr, index: int) -> ast.expr | None:
    """Return the annotation of the items of a list or a mapping; None without one."""
    if not isinstance(node, ast.Subscript):
        return None
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if _name(members[index]) == "Ellipsis":
        return members[0]
    return members[index]


def _is_other_scalar(text: str, kinds: set[str]) -> bool:
    """Return True if a text may be read as a number, a boolean or null.

    YAML reads 1e-3 as a text.
    """
    if NUMBER in kinds:
        try:
            float(text)
            return True
        except ValueError:
            pass
    if BOOL in kinds and text.lower() in ("true", "false", "yes", "no"):
        return True
    return NULL in kinds and text == "null"
