"""Whether the files of an analysis are there already: drawing them takes seconds, and the same study gives the same.

Beside the files of a study lies a stamp, `.made-from`: what they were made from, and what they were then.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lit_dps.files import replacing
from lit_dps.record import StudyRecord

STAMP = ".made-from"


def made_from(record: StudyRecord) -> str:
    """A hash of a study, of the code that draws it and of matplotlib's version. Equal ones are equal figures."""
    found = hashlib.sha256(version("matplotlib").encode())
    package = Path(__file__).parents[1]
    for file in sorted((*package.glob("*.py"), *package.glob("analysis/**/*.py"))):
        found.update(file.read_bytes())
    found.update(pickle.dumps(vars(record), protocol=5))
    return found.hexdigest()


def kept(folder: Path, source: str) -> tuple[list[Path], list[str]] | None:
    """The files and notes of an earlier analysis of the same; None if there was none, or a file is gone or another."""
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        files = {folder / name: digest for name, digest in stamp["files"].items()}
        same = stamp["source"] == source and all(_digest(path) == digest for path, digest in files.items())
        return (list(files), stamp["notes"]) if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever somebody made of it
        return None


def keep(folder: Path, source: str, files: Iterable[Path], notes: list[str]) -> None:
    """Writes the stamp."""
    digests = {str(path.relative_to(folder)): _digest(path) for path in files}
    with replacing(folder / STAMP) as temporary:
        temporary.write_text(json.dumps({"source": source, "notes": notes, "files": digests}), encoding="utf-8")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
