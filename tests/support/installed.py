"""Facts of the installed packages, looked up once a process.

Optuna reads its migrations whenever a storage opens (30 ms), and Lightning reads the entry points
of all packages for each trainer (6 ms). Neither changes while tests run.
"""

from __future__ import annotations

from functools import cache

from lightning.fabric.utilities import registry
from optuna.storages._rdb.storage import _VersionManager

_head_version = _VersionManager.get_head_version


def look_up_once() -> None:
    """Keep the first answer of both from here on."""
    registry.entry_points = cache(registry.entry_points)
    answer = []

    def get_head_version(manager: _VersionManager) -> str:
        if not answer:
            answer.append(_head_version(manager))
        return answer[0]

    _VersionManager.get_head_version = get_head_version
