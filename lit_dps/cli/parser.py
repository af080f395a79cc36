"""One-line errors for jsonargparse parsers, and what a mistyped name was likely meant to be."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from lit_dps.cli.command_line import options_of, read_config
from lit_dps.cli.shipped import how_to_get
from lit_dps.core.error_origin import find_user_error
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.parse_errors import one_line
from lit_dps.core.text import closest_name, shorten_message
from lit_dps.storage.urls import without_password

OURS = ("lit_dps.models", "lit_dps.data", "lit_dps.module")
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_BARE = re.compile(r"Expected a dot import path string: (\w+)")
_OPTION = re.compile(r"unrecognized arguments: (--[\w.-]+)")
_KEY = re.compile(r"(?:^Option|accept option) '([\w.]+)'")
_ARGUMENT = re.compile(r"(model|data): Option '(\w+)' is not accepted")


class CommandError(UserError):
    """A command line or configuration file that does not parse."""


class OneLineErrors:
    """Mixin for jsonargparse's ArgumentParser: an error is raised as one line, instead of usage,
    tip and exit."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_args(*args, **kwargs)
        except UnicodeDecodeError as error:
            raise CommandError(f"a configuration file is no text in UTF-8: {error}") from error

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as text, as --print_config prints it, without the passwords of its
        URLs."""
        cfg = cfg.clone()
        for key in ("optuna", "mlflow"):
            if isinstance(url := cfg.get(f"storage.{key}"), str):
                cfg[f"storage.{key}"] = without_password(url)
        return super().dump(cfg, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within: the one around it adds its key
            super().error(message, ex)
        text = one_line(message)
        if missing := re.search(r"File does not exist: '(.+)'", text):
            text += how_to_get(missing[1])
        raise find_user_error(ex) or CommandError(
            shorten_message(text) + likely_meant(text, self)
        ) from ex


class PlainParser(OneLineErrors, ArgumentParser):
    """jsonargparse's parser with errors of one line."""


def refuse_nulls(config: Mapping[str, Any], classes: Mapping[str, type]) -> None:
    """Raises ConfigError for arguments that are null and may not be, and for what is there in place
    of arguments.

    jsonargparse takes null for "left out".

    Args:
        config: A configuration.
        classes: Its keys that hold the arguments of a class.
    """
    for key, cls in classes.items():
        if not isinstance(config[key], (Mapping, Namespace)):
            raise ConfigError(key, config[key], "arguments by name, or left out")
        for name, hint in get_type_hints(cls.__init__).items():
            if (
                name in config[key]
                and config[key][name] is None
                and type(None) not in get_args(hint)
            ):
                raise ConfigError(f"{key}.{name}", None, "a value is needed")


def likely_meant(text: str, parser: argparse.ArgumentParser) -> str:
    """What to add to a parser's error: "; did you mean ...?", or nothing. The parser has imported
    what was named."""
    if re.search(r"are required: (\w+\.)?data, (\w+\.)?model$", text):
        return "; a configuration file has them, and `lit-dps configs` lists those of the package"
    near = next(filter(None, (_option(text, parser), *_classes(text), _argument(text))), None)
    return f"; did you mean {near}?" if near else ""


def _option(text: str, parser: argparse.ArgumentParser) -> str | None:
    if match := _OPTION.search(text):
        return closest_name(match[1], _options(parser))
    key = _KEY.search(text)
    return closest_name(key[1], (option[2:] for option in _options(parser))) if key else None


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The long options of a parser and of those below it."""
    found = {option for option in parser._option_string_actions if option.startswith("--")}
    for action in parser._actions:
        below = action.choices.values() if isinstance(action.choices, dict) else ()
        found |= {
            option
            for each in below
            if isinstance(each, argparse.ArgumentParser)
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
    path = ""
    for option in options_of(sys.argv[1:]):
        if option.is_config:
            content = read_config(option.text).get(section)
            if isinstance(content, dict):
                path = content.get("class_path", path)
        elif option.name in (f"--{section}", f"--{section}.class_path"):
            path = option.text
    return str(path)
