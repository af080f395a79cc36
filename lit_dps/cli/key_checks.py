"""Refuses mistyped keys and values of the wrong kind, before PyTorch is imported.

Importing PyTorch takes seconds. The keys of a section are the fields of its dataclass; those of
Lightning's Trainer are read from its source. jsonargparse checks the rest afterwards.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lit_dps.cli.command_line import options_of, read_config
from lit_dps.cli.shipped import how_to_get
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import closest_name, shorten
from lit_dps.core.trial_config import TRIAL_SECTIONS

CLASSES = {"class_path", "init_args", "dict_kwargs"}  # of sections that name a class
COMMON = {"config", "help", "print_config", "seed_everything"}
OPTIONS = {  # of the commands whose configuration is that of a study
    "study": COMMON
    | {
        "engine",
        "forecast",
        "extend-space",
        "accept-code-change",
        "show",
        "take-over",
        "time-steps",
        "validate-every",
    },
    "masks": COMMON | {"engine", "at", "points", "output"},
    "advise": COMMON
    | {"engine", "budget", "method", "devices", "price", "bandwidth", "latency", "trials"},
}
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
CLASS_SECTIONS = ("model", "data")


def refuse_unknown(argv: list[str], verb: str = "study") -> None:
    """Raise UserError if a key of a command is in no section."""
    known, options = sections(), OPTIONS[verb]
    for dashes, key in _keys_of(argv):
        section, _, rest = key.partition(".")
        name = rest.partition(".")[0]
        if section not in known and section not in options:
            _refuse(dashes, section, section, {*known, *options})
        if name and name != "help" and known.get(section) and name not in known[section]:
            _refuse(
                dashes,
                f"{section}.{name}",
                name,
                {f"{section}.{other}" for other in known[section]},
            )


def sections() -> dict[str, set[str]]:
    """Return the keys of each section; empty for sections that this module cannot read."""
    return {
        "model": set(),
        "data": set(),
        **{section: set(found) for section, found in annotations_by_key().items()},
    }


def annotations_by_key() -> dict[str, dict[str, str]]:
    """Return the annotation of each key, as text, by section; empty for unreadable sections."""
    configs = {"study": StudyConfig, "storage": StorageConfig, **TRIAL_SECTIONS}
    sections = {}
    for section, config in configs.items():
        sections[section] = {field.name: str(field.type) for field in dataclasses.fields(config)}
    lightning = find_spec("lightning")  # does not import it
    folder = Path(lightning.origin).parent if lightning and lightning.origin else Path()
    sections["trainer"] = _arguments_in_source(
        folder / "pytorch" / "trainer" / "trainer.py", "Trainer"
    )
    return sections


@cache
def _arguments_in_source(file: Path, name: str) -> dict[str, str]:
    """Return the annotations of a class's arguments, as text, by name.

    Returns:
        Empty if the class is missing, or if it has `**kwargs`.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    method = _constructor(tree, name)
    if method is None or method.args.kwarg is not None:
        return {}
    parameters = [*method.args.args[1:], *method.args.kwonlyargs]
    return {parameter.arg: _text_of(parameter.annotation) for parameter in parameters}


def _constructor(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    """Return the `__init__` of a class in a module; None if there is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return method
    return None


def _text_of(annotation: ast.expr | None) -> str:
    return "Any" if annotation is None else ast.unparse(annotation)


def _keys_of(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a command line, with "--", and of its configuration files, with ""."""
    for option in options_of(argv):
        if option.name.startswith("--"):
            yield "--", option.name[2:].rstrip("+")
        if not option.is_config:
            continue
        for section, content in read_config(option.text).items():
            yield "", str(section)
            if isinstance(content, dict) and not CLASSES & content.keys():
                yield from (("", f"{section}.{key}") for key in content if isinstance(key, str))


def _refuse(dashes: str, key: str, name: str, known: set[str]) -> None:
    near = closest_name(key, known)
    raise UserError(
        f"{dashes}{key}: {name!r} is not accepted"
        + (f"; did you mean {dashes}{near}?" if near else "")
    )


def check_shape(argv: list[str], verb: str) -> None:
    """Check the configuration files and options of a command.

    Args:
        argv: The command line without its verb.
        verb: The verb.

    Raises:
        UserError: if a file does not exist, or does not parse; with line and column.
        ConfigError: if a value is not of the kind that its key takes.
    """
    known = annotations_by_key()
    for key, value in _options_of(argv, verb):
        section, _, name = key.partition(".")
        if section in CLASS_SECTIONS and not name:
            _check_class(section, value)
        elif not name and section in known:
            _check_section(section, value, known[section])
        elif name in known.get(section, {}):
            _check(key, value, known[section][name])


def _options_of(argv: list[str], verb: str) -> Iterator[tuple[str, Any]]:
    """Yield the sections of a command's configuration files, and its options SECTION.NAME."""
    for option in options_of(argv):
        name = option.name
        if option.is_config:
            yield from _load_config(option.text, verb).items()
        elif name.startswith("--") and name.count(".") == 1 and not name.endswith(("+", ".help")):
            try:
                yield name[2:], yaml.safe_load(option.text)
            except yaml.YAMLError:
                continue


def _load_config(file: str, verb: str) -> dict[str, Any]:
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
