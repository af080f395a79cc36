"""Refuses a mistyped key before PyTorch is imported: reads the keys of each section from the
source.

Importing PyTorch takes seconds. The parser checks everything else afterwards.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import UserError
from lit_dps.core.text import closest_name

PACKAGE = Path(__file__).parents[1]
CALLBACKS = {  # section -> the file and the class whose arguments it takes
    "goal": ("training/goal_callback.py", "GoalErrorCallback"),
    "pruning": ("training/pruning_callback.py", "PruningCallback"),
    "optim": ("training/delay_callback.py", "DelayCallback"),
    "local": ("training/local_sgd_callback.py", "LocalSGDCallback"),
    "smoothness": ("readings/lipschitz.py", "SmoothnessCallback"),
}
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


def refuse_unknown(argv: list[str], verb: str = "study") -> None:
    """Raise UserError if a key of a command is in no section."""
    known, options = sections(), OPTIONS[verb]
    for dashes, key in given(argv):
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
        **{section: set(found) for section, found in annotations().items()},
    }


def annotations() -> dict[str, dict[str, str]]:
    """Return the annotation of each key, as text, by section; empty for unreadable sections."""
    sections = {}
    for section, config in (("study", StudyConfig), ("storage", StorageConfig)):
        sections[section] = {field.name: str(field.type) for field in dataclasses.fields(config)}
    for section, (file, name) in CALLBACKS.items():
        sections[section] = arguments(PACKAGE / file, name)
    lightning = find_spec("lightning")  # does not import it
    folder = Path(lightning.origin).parent if lightning and lightning.origin else Path()
    sections["trainer"] = arguments(folder / "pytorch" / "trainer" / "trainer.py", "Trainer")
    return sections


@cache
def arguments(file: Path, name: str) -> dict[str, str]:
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


def given(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a command line, with "--", and those of its configuration files, with
    ""."""
    for i, option in enumerate(argv):
        name, equals, value = option.partition("=")
        if name.startswith("--"):
            yield "--", name[2:].rstrip("+")
        if name in ("--config", "-c"):
            file = value if equals else "".join(argv[i + 1 : i + 2])
            for section, content in read(file).items():
                yield "", str(section)
                if isinstance(content, dict) and not CLASSES & content.keys():
                    yield from (("", f"{section}.{key}") for key in content if isinstance(key, str))


def read(file: str) -> dict[str, Any]:
    """Return the content of a configuration file; empty if it is unreadable or no mapping."""
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # the parser reports the error
        return {}
    return found if isinstance(found, dict) else {}


def _refuse(dashes: str, key: str, name: str, known: set[str]) -> None:
    near = closest_name(key, known)
    raise UserError(
        f"{dashes}{key}: {name!r} is not accepted"
        + (f"; did you mean {dashes}{near}?" if near else "")
    )
