"""One-line errors for jsonargparse parsers."""

from __future__ import annotations

from typing import NoReturn

from jsonargparse import ArgumentParser

from lit_dps.errors import UserError, user_error_in
from lit_dps.messages import condensed


class CommandError(UserError):
    """A command line or configuration file that does not parse."""


class OneLineErrors:
    """Mixin for jsonargparse's ArgumentParser: an error is raised as one line, instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within: the one around it adds its key
            super().error(message, ex)
        raise user_error_in(ex) or CommandError(condensed(message)) from ex


class PlainParser(OneLineErrors, ArgumentParser):
    """jsonargparse's parser with errors of one line."""
