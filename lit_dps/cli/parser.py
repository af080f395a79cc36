"""One-line errors for jsonargparse parsers, with the name that was probably meant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import ConfigFile, split_last
from lit_dps.cli.shipped import how_to_get
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError, UserError, find_user_error
from lit_dps.core.parse_errors import TYPE_WORDS, refusal
from lit_dps.core.text import closest_key, closest_name, shorten_message
from lit_dps.storage.urls import without_password

# Modules with classes that a configuration may name.
OUR_MODULES = ("lit_dps.models", "lit_dps.data", "lit_dps.module")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_BARE_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--[\w.-]+)")
_UNKNOWN_WORD = re.compile(r"unrecognized arguments: ([^-]\S*)")
_UNKNOWN_KEY = re.compile(r"(?:^Option|accept option) '([\w.]+)'")
_MISSING_FILE = re.compile(r"File does not exist: '(.+)'")


class CommandParser(ArgumentParser):
    """jsonargparse's parser of a `CommandLine`, with errors of one line.

    An error is raised, instead of printing usage and a tip and leaving the process.

    Attributes:
        command: The command; None without one. The parser reads no configuration file itself.
    """

    command: CommandLine | None = None
    _file: ConfigFile | None = None

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse a command line."""
        try:
            return super().parse_args(*args, **kwargs)
        except UnicodeDecodeError as error:
            raise UserError(
                f"a configuration file is not text in UTF-8 ({error}). Save it in UTF-8."
            ) from error

    def read_command(self) -> Namespace:
        """Return the options and the section storage of the command; its sections are built."""
        assert self.command is not None
        self.add_class_arguments(StorageConfig, "storage")
        config = self.instantiate_classes(self.parse_args(self.command.words))
        assert isinstance(config, Namespace)
        return config

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a configuration file with the content that the command has read."""
        if self.command is not None:
            self._file = self.command.files.get(str(path))
        return super().parse_path(path, *args, **kwargs)

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a configuration, or in its place the file of `parse_path`."""
        file, self._file = self._file, None
        if file is not None:
            content = file.text
        return super().parse_string(content, *args, **kwargs)

    def dump(self, cfg: Namespace, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as text, without the passwords of its URLs."""
        cfg = cfg.clone()
        for key in ("storage.optuna", "storage.mlflow"):
            url = cfg.get(key)
            if isinstance(url, str):
                cfg[key] = without_password(url)
        return super().dump(cfg, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError with one line."""
        if not self.exit_on_error:  # an inner parser: the outer one adds its key
            super().error(message, ex)
        raise find_user_error(ex) or self._refusal(message) from ex

    def _refusal(self, message: str) -> UserError:
        """Return an error of jsonargparse with the key and the value that the user wrote."""
        error = refusal(message)
        if isinstance(error, ConfigError) and error.key is not None:
            key, value = error.key, error.value
            if self.command is not None:
                key = self.command.written_name(key)
                value = self.command.written_value(error.key, str(error.value))
            return ConfigError(
                key, value, error.allowed or "", error.hint or _hint(value, error.allowed)
            )
        text = str(error)
        meant = likely_meant(text, self)
        missing = _MISSING_FILE.search(text)
        if missing is not None:
            text += how_to_get(missing[1])
        key = error.key
        option = _UNKNOWN_OPTION.search(text)
        if option is not None:
            key = option[1].removeprefix("--")
        unknown = _UNKNOWN_KEY.search(text)
        if unknown is not None:
            key = unknown[1]
            text = f"{key}: {split_last(key)[1]!r} is not accepted"
        text = shorten_message(text) + meant
        return UserError(text, key=key, allowed=error.allowed, hint=error.hint)


def _hint(value: Any, allowed: str | None) -> str | None:
    """Return how to write a value that YAML reads as another type; None if that is unknown."""
    if allowed == TYPE_WORDS["str"] and isinstance(value, (bool, int, float)):
        return "Write it in quotes."
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    if allowed == TYPE_WORDS["int"] and is_whole:
        return f"Write {value:.0f}."
    return None


def new_parser(command: CommandLine, description: str | None) -> CommandParser:
    """Return a parser for a command without a configuration of model and data."""
    parser = CommandParser(prog=f"lit-dps {command.verb}", description=description)
    parser.command = command
    return parser


def refuse_nulls(config: Mapping[str, Any] | Namespace, classes: Mapping[str, type]) -> None:
    """Raise ConfigError for null arguments that must have a value.

    jsonargparse takes null for a missing argument.

    Args:
        config: A configuration.
        classes: Its keys that hold the arguments of a class.

    Raises:
        ConfigError: also for a value in place of arguments.
    """
    for key, cls in classes.items():
        arguments = config[key]
        if not isinstance(arguments, (Mapping, Namespace)):
            raise ConfigError(key, arguments, "arguments by name, or omitted")
        for name, hint in get_type_hints(cls.__init__).items():
            may_be_null = type(None) in get_args(hint)
            if name in arguments and arguments[name] is None and not may_be_null:
                raise ConfigError(f"{key}.{name}", None, "a value")


def likely_meant(text: str, parser: argparse.ArgumentParser) -> str:
    """Return "; did you mean ...?" for a parser's error, or "" without a similar name.

    The parser has imported the modules of the classes that the text names.
    """
    word = _UNKNOWN_WORD.search(text)
    if word is not None and word[1].endswith((".yaml", ".yml")):
        return "; write --config before each file, or all files before the options"
    near = _similar_option(text, parser) or _similar_class(text)
    if near is None:
        return ""
    return f"; did you mean {near}?"


def _similar_option(text: str, parser: argparse.ArgumentParser) -> str | None:
    option = _UNKNOWN_OPTION.search(text)
    if option is not None:
        return closest_key(option[1], _options_of(parser))
    key = _UNKNOWN_KEY.search(text)
    if key is not None:
        return closest_key(key[1], (option[2:] for option in _options_of(parser)))
    return None


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the long options of a parser and of its subparsers."""
    options = {option for option in parser._option_string_actions if option.startswith("--")}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                if isinstance(subparser, argparse.ArgumentParser):
                    options |= _options_of(subparser)
    return options


def _similar_class(text: str) -> str | None:
    """Return the path of a class that is similar to one that a text names."""
    for path in _CLASS_PATH.findall(text):
        module_name, name = split_last(path)
        module = sys.modules.get(module_name)
        if module is None or hasattr(module, name):
            continue
        near = closest_name(name, vars(module))
        if near is not None:
            return f"{module_name}.{near}"
    bare = _BARE_CLASS.search(text)
    if bare is None:
        return None
    paths = _our_classes()
    near = closest_name(bare[1], paths)
    if near is None:
        return None
    return paths[near]


def _our_classes() -> dict[str, str]:
    """Return the paths of the classes of this package that are imported, by name."""
    paths = {}
    for module in OUR_MODULES:
        if module in sys.modules:
            for name in vars(sys.modules[module]):
                if name[0].isupper():
                    paths[name] = f"{module}.{name}"
    return paths
