"""Writing a file so that a reader, or a crash, never sees half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_dps.core.errors import StorageError, one_line, shortened

NOT_WRITTEN = "not written: "  # beginning of a note on a failure


def not_written(what: str, error: Exception) -> str:
    """Return the note that a file or figure could not be written, in one line."""
    reason = str(error)
    if not isinstance(error, StorageError):
        reason = f"{type(error).__name__}: {one_line(error)}"
    return f"{NOT_WRITTEN}{what}: {shortened(reason)}"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it replaces `path` at the end, or is removed if
    the body raises.

    Its folder is made where there is none.

    Raises:
        StorageError: if there is no room, no permission, or a file in the folder's place.
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
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
