"""Refuses a mistyped key at once: what a section takes is read from source, since importing torch takes seconds.

The parser that comes after it checks all the rest, and whatever is not read here.
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

from lit_dps.config import StorageConfig, StudyConfig
from lit_dps.errors import UserError, meant

PACKAGE = Path(__file__).parents[1]
CALLBACKS = {  # section -> the file and the class whose arguments it takes
    "goal": ("goal_error.py", "GoalErrorCallback"),
    "pruning": ("pruning.py", "PruningCallback"),
    "optim": ("delay.py", "DelayCallback"),
    "local": ("local.py", "LocalSGDCallback"),
    "smoothness": ("gradients.py", "SmoothnessCallback"),
}
CLASSES = {"class_path", "init_args", "dict_kwargs"}  # of sections that name a class
COMMON = {"config", "help", "print_config", "seed_everything"}
OPTIONS = {  # of the commands whose configuration is that of a study
    "study": COMMON
    | {"engine", "forecast", "extend-space", "accept-code-change", "show", "take-over", "time-steps", "validate-every"},
    "masks": COMMON | {"engine", "at", "points", "output"},
    "advise": COMMON | {"engine", "budget", "method", "devices", "price", "bandwidth", "latency", "trials"},
}


def refuse_unknown(argv: list[str], verb: str = "study") -> None:
    """Raises UserError for a key of a command, `study` or `advise`, that no section has."""
    known, options = sections(), OPTIONS[verb]
    for dashes, key in given(argv):
        section, _, rest = key.partition(".")
        name = rest.partition(".")[0]
        if section not in known and section not in options:
            _refuse(dashes, section, section, {*known, *options})
        if name and name != "help" and known.get(section) and name not in known[section]:
            _refuse(dashes, f"{section}.{name}", name, {f"{section}.{other}" for other in known[section]})


def sections() -> dict[str, set[str]]:
    """The keys of each section; none of those that cannot be read here."""
    return {"model": set(), "data": set(), **{section: set(found) for section, found in annotations().items()}}


def annotations() -> dict[str, dict[str, str]]:
    """Return the annotation of each key, as text, by section; none of sections that cannot be read here."""
    found = {}
    for section, config in (("study", StudyConfig), ("storage", StorageConfig)):
        found[section] = {field.name: str(field.type) for field in dataclasses.fields(config)}
    for section, (file, name) in CALLBACKS.items():
        found[section] = arguments(PACKAGE / "training" / file, name)
    lightning = find_spec("lightning")  # which imports nothing of it
    folder = Path(lightning.origin).parent if lightning and lightning.origin else Path()
    found["trainer"] = arguments(folder / "pytorch" / "trainer" / "trainer.py", "Trainer")
    return found


@cache
def arguments(file: Path, name: str) -> dict[str, str]:
    """Return the arguments of a class and their annotations by its source; none if it takes any, or is not there."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__" and method.args.kwarg is None:
                    found = (*method.args.args[1:], *method.args.kwonlyargs)
                    return {
                        each.arg: "Any" if each.annotation is None else ast.unparse(each.annotation) for each in found
                    }
    return {}


def _text_of(annotation: ast.expr | None) -> str:
    return "Any" if annotation is None else ast.unparse(annotation)


def given(argv: list[str]) -> Iterator[tuple[str, str]]:
    """The keys of a command line, with dashes, and of its configuration files, as far as their sections have keys."""
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
    """What stands in a configuration file; nothing if it cannot be read, or is none."""
    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # the parser says what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def _refuse(dashes: str, key: str, name: str, known: set[str]) -> None:
    near = meant(key, known)
    raise UserError(f"{dashes}{key}: {name!r} is not accepted" + (f"; did you mean {dashes}{near}?" if near else ""))
