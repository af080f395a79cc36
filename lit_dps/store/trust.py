"""Which studies may name modules that are imported to train their trials again: those that this user has run here.

A database holds no code, but the configuration in it names modules, whose import runs code. So the studies that
`lit-dps study` runs are noted by their uid, in the user's own folder and not in the storage, which may be a stranger's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Packages that are imported anyhow; whatever else is imported may run anything.
KNOWN_PACKAGES = {"lit_dps", "lightning", "torch", "torchvision", "optuna"}


def own_studies_file() -> Path:
    """Return the file with a uid a line, below $XDG_STATE_HOME or ~/.local/state."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "lit_dps" / "studies"


def remember(uid: str) -> None:
    """Note that this user has run a study. Nothing happens where that cannot be written: --trust does as well."""
    if is_own(uid):
        return
    file = own_studies_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{uid}\n")


def is_own(uid: str | None) -> bool:
    """Return True if this user has run the study of a uid."""
    if uid is None:
        return False
    try:
        return uid in own_studies_file().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False


def foreign_modules(config: Any) -> list[str]:
    """Return the modules that a stored configuration may import, sorted, but those of `KNOWN_PACKAGES`.

    Every text that may be a class path counts, wherever it stands: a key of a class takes one without `class_path`.
    """
    modules = {text.rpartition(".")[0] for text in _texts(config)}
    return sorted(module for module in modules if module.partition(".")[0] not in KNOWN_PACKAGES)


def _texts(config: Any) -> Iterator[str]:
    """The texts of nested values that are dotted names."""
    if isinstance(config, dict):
        for value in config.values():
            yield from _texts(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _texts(value)
    elif isinstance(config, str) and "." in config and all(part.isidentifier() for part in config.split(".")):
        yield config
