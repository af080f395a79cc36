"""Atomic writes: a reader never sees half of a file, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_dps.core.errors import ConfigError, StorageError
from lit_dps.core.text import shorten

NOT_WRITTEN = "not written: "  # beginning of a note on a failure


def not_written(what: str, error: Exception) -> str:
    """Return the note that a file or figure could not be written, in one line."""
    reason = str(error)
    if not isinstance(error, StorageError):
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{NOT_WRITTEN}{what}: {shorten(reason)}"


def check_folder(option: str, folder: Path) -> None:
    """Raise ConfigError if files cannot be written to the folder that an option names."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(option, str(folder), f"a folder, but {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            option, str(folder), f"a folder that you may write to; {nearest} is not writable"
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` after the body.

    The temporary file is removed if the body raises. A missing folder is created.

    Raises:
        StorageError: if the disk is full, permission is missing, or a file has the folder's name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(
            f"{path} cannot be written ({reason}). Free space, or choose another folder.",
            key=str(path),
            value=reason,
        ) from error
