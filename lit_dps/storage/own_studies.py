"""Remembers which studies this user has run. Lists the modules that a stored study would import.

A database holds no code. But its configuration names modules, and importing a module runs code.
So `lit-dps study` notes the uid of each study that it runs in a file of the user. A note in the
storage would prove nothing, because the storage may come from somebody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Packages that lit_dps imports anyway. Any other module may run arbitrary code.
KNOWN_PACKAGES = {"lit_dps", "lightning", "torch", "torchvision", "optuna"}


def own_studies_file() -> Path:
    """Return the file of uids, one a line, below $XDG_STATE_HOME or ~/.local/state."""
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "lit_dps" / "studies"


def remember(uid: str) -> None:
    """Note that this user has run a study."""
    if is_own(uid):
        return
    file = own_studies_file()
    # Without a note, the user can still pass --trust.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{uid}\n")


def is_own(uid: str | None) -> bool:
    """Return True if this user has run the study with this uid."""
    if uid is None:
        return False
    try:
        return uid in own_studies_file().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False


def foreign_modules(config: Any) -> list[str]:
    """Return the modules outside `KNOWN_PACKAGES` that a configuration may import, sorted.

    Every text that may be a class path counts, under any key, because a class may be given by its
    path alone, without `class_path`.
    """
    modules = {text.rpartition(".")[0] for text in _texts(config)}
    return sorted(module for module in modules if module.partition(".")[0] not in KNOWN_PACKAGES)


def _texts(config: Any) -> Iterator[str]:
    """Yield the texts among nested values that are dotted names."""
    if isinstance(config, dict):
        for value in config.values():
            yield from _texts(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _texts(value)
    elif isinstance(config, str) and _is_dotted_name(config):
        yield config


def _is_dotted_name(text: str) -> bool:
    return "." in text and all(part.isidentifier() for part in text.split("."))
