"""One-line errors for jsonargparse parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from lit_dps.cli.shipped import how_to_get
from lit_dps.cli.suggestions import likely_meant
from lit_dps.core.error_origin import find_user_error
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.parse_errors import one_line
from lit_dps.core.text import shorten_message
from lit_dps.storage.urls import without_password


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
