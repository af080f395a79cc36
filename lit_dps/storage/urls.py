"""Database URLs: the file that a URL names, whether it can be used, and how to hide secrets."""

from __future__ import annotations

import os
import re
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
_URL = re.compile(r"(?P<before>[^:/?#@]*?)(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>.*)", re.DOTALL)
_USER = re.compile(r"[\w.-]*")
# A port has at most five digits; more may be a password.
_HOST = re.compile(
    r"[^:/?#]*(:\d{0,5})?([/?#].*)?|\[[\da-fA-F:.]+\](:\d{0,5})?([/?#].*)?", re.DOTALL
)
# Options of drivers that hold no secret; the values of all others are hidden.
_HARMLESS = {
    "application_name",
    "cache",
    "charset",
    "check_same_thread",
    "connect_timeout",
    "host",
    "mode",
    "port",
    "sslmode",
    "target_session_attrs",
    "timeout",
    "uri",
    "user",
    "username",
}
_RESERVED = re.compile(r"[@:/?#&;=\[\]\s]")


def sqlite_file(url: str) -> Path | None:
    """Return the file that a sqlite URL names; None for a server."""
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///([^?]+)(?:\?.*)?", url)
    if match is None:
        return None
    return Path(match[1])


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
    """Return a URL with *** in place of passwords, tokens and values of unknown options.

    A text that is no URL is returned unchanged if it looks like a path, else as ***.
    """
    return _redact(url).text


class _Redacted(NamedTuple):
    """A URL without its secrets.

    Attributes:
        text: The URL with *** in place of its secrets.
        secrets: The secrets.
    """

    text: str
    secrets: list[str]


def _redact(url: str) -> _Redacted:
    match = _URL.fullmatch(url)
    if match is None:
        if _PATH.fullmatch(url):
            return _Redacted(url, [])
        return _Redacted(HIDDEN, [url])
    before = match["before"]
    scheme = match["scheme"]
    rest = match["rest"]
    if before and not re.fullmatch(r"[\w. -]*=?", before):
        return _Redacted(HIDDEN, [url])
    secrets = []
    user = ""
    is_file = scheme.partition("+")[0] == "sqlite" and rest.startswith("/")
    if not is_file:
        if "@" in rest:
            # A password may contain characters that should be quoted, so it ends at the last @.
            user, rest = rest.rsplit("@", 1)
            user = f"{_redact_user(scheme, user, secrets)}@"
        if not _HOST.fullmatch(rest):
            # Without an @ this may be user:password. Drivers may quote only the password.
            secrets += [rest, rest.partition(":")[2]]
            rest = HIDDEN
    place = rest
    if "?" in rest:
        place, options = rest.split("?", 1)
        place += f"?{_redact_options(options, secrets)}"
    text = f"{before}{scheme}://{user}{place}"
    if not text.isprintable():
        return _Redacted(f"{scheme}://{HIDDEN}", [*secrets, rest])
    return _Redacted(text, secrets)


def _redact_user(scheme: str, user: str, secrets: list[str]) -> str:
    """Return the part before the @ of a URL without its secrets; append these to `secrets`."""
    name, password = user, None
    if ":" in user:
        name, password = user.split(":", 1)
    if password:
        secrets.append(password)
    # A web server's user without a password is a token.
    if not _USER.fullmatch(name) or (name and not password and is_http(f"{scheme}://")):
        secrets.append(name)
        name = HIDDEN
    if password is None:
        return name
    return f"{name}:{HIDDEN}"


def _redact_options(options: str, secrets: list[str]) -> str:
    """Return the options of a URL without possible secrets; append these to `secrets`."""
    shown = []
    for part in re.split(r"([&;])", options):
        name, equals, value = part.partition("=")
        if part in "&;" or (equals and unquote(name).lower() in _HARMLESS):
            shown.append(part)
        elif re.fullmatch(r"[\w.-]+", name) and equals:
            secrets.append(value)
            shown.append(f"{name}={HIDDEN}")
        else:
            secrets.append(part)
            shown.append(HIDDEN)
    return "".join(shown)


def ui_command(uri: str) -> str:
    """Return the command that shows the runs of a tracking URI.

    In a checkout it is a command of make, because the package may not be installed.
    """
    if uri != StorageConfig().mlflow_uri:
        return f"lit-dps ui --storage.mlflow {without_password(uri)}"
    here = Path.cwd()
    if Path(lit_dps.__file__).parents[1] == here and (here / "Makefile").is_file():
        return "make ui"
    return "lit-dps ui"


def ui_hint(uri: str) -> str:
    """Return what follows the place of a report: how to see the trials in MLflow."""
    return f"; trials in MLflow: {ui_command(uri)}"


def scrubbed(text: str, url: str) -> str:
    """Return the message of a database with *** in place of the secrets of its URL.

    If the URL can be parsed in several ways, a fixed sentence replaces the message, because the
    message may contain parts of a secret.
    """
    secrets = _redact(url).secrets
    if any(_RESERVED.search(secret) for secret in secrets):
        return "the message of the driver is not shown, because parts of the password may be in it"
    return _replaced(text, secrets)


def scrubbed_of(text: str, url: str) -> str:
    """Return a message of lit_dps with *** in place of the secrets of a URL."""
    if "://" in url:
        return _replaced(text, _redact(url).secrets)
    # The part before an @ or after a = may be a password.
    if "@" in url or "=" in url:
        return _replaced(text, [url])
    return text


def _replaced(text: str, secrets: list[str]) -> str:
    """Return a text with *** in place of secrets, in all forms that a driver may print."""
    # A driver may end a secret at a #, so the part before it is hidden, too.
    beginnings = [secret.partition("#")[0] for secret in secrets]
    for secret in [*secrets, *beginnings]:
        if len(secret) < SHORTEST_SECRET:
            continue
        forms = {secret, " ".join(secret.split()), secret.lower()}
        forms |= {unquote(secret), unquote_plus(secret), quote(secret)}
        for form in sorted(filter(None, forms), key=len, reverse=True):
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
