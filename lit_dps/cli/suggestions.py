"""What a mistyped option, class, or argument of a class was likely meant to be."""

from __future__ import annotations

import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator

from lit_dps.cli.keys import read
from lit_dps.core.text import closest_name

OURS = ("lit_dps.models", "lit_dps.data", "lit_dps.module")
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_BARE = re.compile(r"Expected a dot import path string: (\w+)")
_OPTION = re.compile(r"unrecognized arguments: (--[\w.-]+)")
_KEY = re.compile(r"(?:^Option|accept option) '([\w.]+)'")
_ARGUMENT = re.compile(r"(model|data): Option '(\w+)' is not accepted")


def likely_meant(text: str, parser: ArgumentParser) -> str:
    """What to add to a parser's error: "; did you mean ...?", or nothing. The parser has imported
    what was named."""
    if re.search(r"are required: (\w+\.)?data, (\w+\.)?model$", text):
        return "; a configuration file has them, and `lit-dps configs` lists those of the package"
    near = next(filter(None, (_option(text, parser), *_classes(text), _argument(text))), None)
    return f"; did you mean {near}?" if near else ""


def _option(text: str, parser: ArgumentParser) -> str | None:
    if match := _OPTION.search(text):
        return closest_name(match[1], _options(parser))
    key = _KEY.search(text)
    return closest_name(key[1], (option[2:] for option in _options(parser))) if key else None


def _options(parser: ArgumentParser) -> set[str]:
    """The long options of a parser and of those below it."""
    found = {option for option in parser._option_string_actions if option.startswith("--")}
    for action in parser._actions:
        below = action.choices.values() if isinstance(action.choices, dict) else ()
        found |= {
            option
            for each in below
            if isinstance(each, ArgumentParser)
            for option in _options(each)
        }
    return found


def _classes(text: str) -> Iterator[str | None]:
    for path in _PATH.findall(text):
        module, _, name = path.rpartition(".")
        found = sys.modules.get(module)
        if (
            found is not None
            and not hasattr(found, name)
            and (near := closest_name(name, vars(found)))
        ):
            yield f"{module}.{near}"
    if bare := _BARE.search(text):
        public = {name: module for module in OURS for name in vars(sys.modules.get(module, sys))}
        if near := closest_name(bare[1], (name for name in public if name[0].isupper())):
            yield f"{public[near]}.{near}"


def _argument(text: str) -> str | None:
    if not (match := _ARGUMENT.search(text)):
        return None
    section, name = match.groups()
    module, _, last = _class_path(section).rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    near = (
        closest_name(name, inspect.signature(found).parameters) if inspect.isclass(found) else None
    )
    return f"{section}.{near}" if near else None


def _class_path(section: str) -> str:
    """The class that the command line names for a section, or the last of its configuration
    files."""
    path, words = "", sys.argv[1:]
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        value = value if equals else "".join(words[i + 1 : i + 2])
        if option in ("--config", "-c"):
            content = read(value).get(section)
            path = content.get("class_path", path) if isinstance(content, dict) else path
        elif option in (f"--{section}", f"--{section}.class_path"):
            path = value
    return str(path)
