"""Artifacts of a run: logged where they are missing or have another content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient


def log_artifacts(client: MlflowClient, run: str, files: Sequence[Path], texts: Mapping[str, str]) -> None:
    """Logs files, and texts by their names, unless they are there with the same content.

    Args:
        client: Where.
        run: The run's id.
        files: They keep their places below the folder that holds them all.
        texts: By name, without a folder.
    """
    root = os.path.commonpath([path.parent for path in files]) if files else ""
    folders: dict[str, dict[str, int]] = {}  # the sizes of what is there

    def differs(name: str, content: bytes) -> bool:
        folder = os.path.dirname(name)
        if folder not in folders:
            folders[folder] = {item.path: item.file_size for item in client.list_artifacts(run, folder or None)}
        if folders[folder].get(name) != len(content):
            return True
        with tempfile.TemporaryDirectory() as temporary:
            return Path(client.download_artifacts(run, name, temporary)).read_bytes() != content

    for path in files:
        name = os.path.relpath(path, root)
        if differs(name, path.read_bytes()):
            client.log_artifact(run, str(path), os.path.dirname(name) or None)
    for name, text in texts.items():
        if differs(name, text.encode()):
            client.log_text(run, text, name)
