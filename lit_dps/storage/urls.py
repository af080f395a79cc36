"""Database URLs: the file that a URL names, whether it can be used, and how to hide secrets."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus

import lit_dps
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError

MAGIC = b"SQLite format 3\0"
HIDDEN = "***"
SHORTEST_SECRET = 3  # characters: shorter ones are parts of ordinary words
# A text that is no URL is shown only if it looks like a file path: any other may contain a
# password.
_PATH = re.compile(r"[\w ./\\+,~()-]*")
# A URL that cannot be read in several ways. Only its passwords and tokens are hidden.
_CLEAR_URL = re.compile(
    r"(?P<before>(?:[\w. -]*=)?(?P<scheme>[A-Za-z][\w+.-]*)://)"
    r"(?:(?P<user>[\w.-]*)(?P<password>:[^@:/?#\s]*)?@)?"
    r"(?P<place>(?:[\w.-]*|\[[\da-fA-F:.]+\])(?::\d{0,5})?(?:/[^@?#\s]*)?)"
    r"(?:\?(?P<options>[\w.=&;%+/:,~-]*))?"
)
# An option that may hold a secret, by its name or by a name within its value.
_SECRET_OPTION = re.compile(
    r"(?:pass|pwd|key|token|secret|auth|cred|jwt|signature|\bsig\b|dsn|odbc)[\w .-]*[=:]|@",
    re.IGNORECASE,
)


def sqlite_file(url: str) -> Path | None:
    """Return the file that a sqlite URL names; None for a server."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url)
    if match is None:
        return None
    return Path(match[1])


def without_link(file: Path) -> Path:
    """Return the file that a symbolic link names; any other file, and a loop of links, as it is.

    Locks are beside this file, so that all processes see them, whichever name they use.
    """
    try:
        return file.resolve() if file.is_symlink() else file
    except (OSError, RuntimeError):  # before Python 3.13, a loop raises RuntimeError
        return file


def absolute(url: str) -> str:
    """Return a URL with the absolute path of its sqlite file.

    MLflow caches connections by the text of the URL, and the working directory may change.
    """
    file = sqlite_file(url)
    if file is None:
        return url
    return url.replace(f":///{file}", f":///{file.absolute()}", 1)


def is_postgresql(url: str) -> bool:
    """Return True if a URL names a PostgreSQL database."""
    return re.match(r"postgres(ql)?(\+\w+)?://", url) is not None


def is_http(url: str) -> bool:
    """Return True if a URL names a web server."""
    return re.match(r"https?://", url) is not None


def without_password(url: str) -> str:
    """Return a URL with *** in place of its password and of a token.

    If one of its options may hold a secret, *** replaces all options, because an unquoted secret
    may contain the & between two options. If the URL can be read in several ways, only its scheme
    is shown. A text that is no URL is returned unchanged if it looks like a path, else as ***.
    """
    return _redact(url).text


class _Redacted(NamedTuple):
    """A URL without its secrets.

    Attributes:
        text: The URL with *** in place of its secrets.
        secrets: The secrets.
        is_clear: Whether the URL can be read in one way only.
    """

    text: str
    secrets: list[str]
    is_clear: bool = True


def _redact(url: str) -> _Redacted:
    place, _, options = url.partition("?")
    if sqlite_file(url) is not None and place.isprintable():
        shown, secrets = _redact_options(options)
        return _Redacted(f"{place}{shown}", secrets)
    if _PATH.fullmatch(url):
        return _Redacted(url, [])
    match = _CLEAR_URL.fullmatch(url)
    if match is None or not url.isprintable():
        return _redact_unclear(url)
    options = match["options"] or ""
    shown, secrets = _redact_options(options)
    if options and match["user"] is None and re.search(r":\d+$", match["place"]):
        # Without an @ this may be a user and a password that contains a question mark.
        shown, secrets = f"?{HIDDEN}", _secrets_of(options)
    text = match["before"]
    if match["user"] is not None:
        user = match["user"]
        # A web server's user without a password is a token.
        if user and not match["password"] and match["scheme"] in ("http", "https"):
            secrets.append(user)
            user = HIDDEN
        text += user
        if match["password"]:
            secrets.append(match["password"][1:])
            text += f":{HIDDEN}"
        text += "@"
    return _Redacted(f"{text}{match['place']}{shown}", secrets)


def _redact_unclear(url: str) -> _Redacted:
    """Return the scheme of a URL that can be read in several ways, or *** for any other text."""
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"(?:[\w. -]*=)?[A-Za-z][\w+.-]*", scheme):
        return _Redacted(HIDDEN, [url], is_clear=False)
    # A password may contain characters that should be quoted, so it ends at the last @.
    user = rest.rpartition("@")[0]
    secrets = [url, rest, user, user.partition(":")[2], rest.partition(":")[2]]
    return _Redacted(f"{scheme}://{HIDDEN}", secrets, is_clear=False)


def _redact_options(options: str) -> tuple[str, list[str]]:
    """Return the options of a URL with their ?, or ?*** if one may hold a secret; and secrets."""
    if not options:
        return "", []
    if options.isprintable() and all(map(_is_harmless, re.split("[&;]", options))):
        return f"?{options}", []
    return f"?{HIDDEN}", _secrets_of(options)


def _is_harmless(option: str) -> bool:
    """Return True for NAME=VALUE in which neither name nor value can hold a secret."""
    if re.fullmatch(r"[\w.-]+=[\w.%+/:,~-]*", option) is None:
        return False
    return _SECRET_OPTION.search(unquote_plus(unquote(option))) is None


def _secrets_of(options: str) -> list[str]:
    """Return what may be a secret in options: from each = to each later end of an option."""
    starts = [match.end() for match in re.finditer("=", options)]
    ends = [match.start() for match in re.finditer("[&;]|$", options)]
    secrets = [options, *re.split("[&;]", options)]
    for start in starts:
        secrets += [options[start:end] for end in ends if end > start]
    return secrets


def ui_command(uri: str) -> str:
    """Return the command that shows the runs of a tracking URI.

    In a checkout it is a command of make, because the package may not be installed.
    """
    if uri != StorageConfig().mlflow_uri:
        return f"lit-dps ui --storage.mlflow {shlex.quote(without_password(uri))}"
    here = Path.cwd()
    if Path(lit_dps.__file__).parents[1] == here and (here / "Makefile").is_file():
        return "make ui"
    return "lit-dps ui"


def ui_hint(uri: str) -> str:
    """Return what follows the place of a report: how to see the trials in MLflow."""
    return f"; trials in MLflow: {ui_command(uri)}"


def scrubbed(text: str, url: str) -> str:
    """Return the message of a database with *** in place of the secrets of its URL.

    If the URL can be read in several ways, a fixed sentence replaces the message, because the
    message may contain parts of a secret.
    """
    redacted = _redact(url)
    if not redacted.is_clear:
        return "the message of the driver is not shown, because parts of the password may be in it"
    return _replaced(text, redacted.secrets)


def scrubbed_of(text: str, url: str) -> str:
    """Return a message of lit_dps with *** in place of the secrets of a URL."""
    return _replaced(text, _redact(url).secrets)


def _replaced(text: str, secrets: list[str]) -> str:
    """Return a text with *** in place of secrets, in all forms that a driver may print."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) < SHORTEST_SECRET:
            continue
        forms = {secret, secret.lower(), unquote(secret), unquote_plus(secret), quote(secret)}
        forms |= {repr(form)[1:-1] for form in forms}  # a message may show the URL with repr
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, HIDDEN)
    return text


def check_place(url: str) -> None:
    """Check that a sqlite file is a database, or that it can be created. Creates nothing.

    Raises:
        StorageError: if the file is no database, or if its folder cannot be made.
    """
    file = sqlite_file(url)
    if file is None:
        return
    place = without_password(url)
    there = nearest_existing(file)
    if there != file and not there.is_dir():
        raise StorageError(
            f"{place} cannot be used: {there} is no folder. Choose another folder.",
            key=place,
            value=str(there),
        )
    if there == file and not file.is_file():
        raise StorageError(
            f"{place} cannot be used: it is no file. Choose another path.", key=place
        )
    if there == file and there.stat().st_size and there.open("rb").read(len(MAGIC)) != MAGIC:
        raise StorageError(
            f"{place} cannot be used: file is not a database. If it was one, it is "
            "damaged: restore it from a copy.",
            key=place,
        )


def check_writable(url: str) -> None:
    """Check that studies can be written to an Optuna storage. Creates nothing.

    Studies are stored in a sqlite file or on PostgreSQL. Only there lit_dps can determine which
    workers are alive.

    Raises:
        StorageError: for another kind of database, or if the file is not writable.
    """
    file = sqlite_file(url)
    if file is None:
        if is_postgresql(url) or not re.match(r"\w+(\+\w+)?://", url):
            return
        kind = url.partition(":")[0]
        raise StorageError(
            f"a database of kind {kind!r} cannot be used. Studies need a SQLite file "
            "(sqlite:///mlruns/study.db) or PostgreSQL "
            "(postgresql+psycopg://USER@HOST/DATABASE).",
            key=without_password(url),
            value=kind,
        )
    # SQLite writes a journal into the folder.
    for path in (nearest_existing(file), nearest_existing(file.parent)):
        if not os.access(path, os.W_OK):
            raise StorageError(
                f"{without_password(url)} cannot be used: {path} is not writable. Make it "
                "writable, or copy the file to another folder.",
                key=without_password(url),
                value=str(path),
            )


def nearest_existing(file: Path) -> Path:
    """Return the file, or the nearest folder above it that exists."""
    return next(path for path in (file, *file.absolute().parents) if path.exists())
