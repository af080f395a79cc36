"""One-line errors for jsonargparse parsers."""

from __future__ import annotations

from typing import NoReturn

from lit_dps.errors import UserError


class CommandError(UserError):
    """A command line or configuration file that does not parse."""


class OneLineErrors:
    """Mixin for jsonargparse's ArgumentParser: an error is raised as one line, instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        cause = ex
        while cause is not None:  # errors of our own come wrapped: they say it best
            if isinstance(cause, UserError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        raise CommandError(" ".join(message.split())) from ex
