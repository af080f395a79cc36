"""The report of a study with its files: what `analyze` prints, and what a study ends with."""

from __future__ import annotations

from pathlib import Path

from lit_dps.analysis.figures import write_all
from lit_dps.analysis.report import render
from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import Scaling, scaling_of


def figures_folder(folder: str | Path, study: str) -> Path:
    """Where the figures of a study go below the storage folder."""
    return Path(folder) / "figures" / study.replace(" ", "_").replace(":", "_")


def publish(record: StudyRecord, folder: Path) -> tuple[str, dict[float, Scaling], list[Path]]:
    """Writes the figures and tables of a study into a folder.

    Returns:
        The report as text with the files' paths below it, the fitted laws by sparsity, and the paths.
    """
    scalings = scaling_of(record)
    files = write_all(record, folder, scalings)
    listing = "".join(f"  {path}\n" for path in files)
    return f"{render(record, scalings)}\nwritten:\n{listing}", scalings, files
