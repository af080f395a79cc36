"""masks: show what pruning methods keep of each layer at initialization.

It makes the masks of a study's methods. It trains and stores nothing.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lit_dps.analysis.layers import layer_rows
from lit_dps.analysis.tables import aligned, write_csv
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.options import MasksOptions, take_options
from lit_dps.cli.study import StudyCLI
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import check_sparsity, text_of
from lit_dps.report.figures.layers import collapse_notes, figures, tables_of
from lit_dps.report.figures.style import without_math
from lit_dps.report.figures.write import save
from lit_dps.report.publish import figures_folder, listing
from lit_dps.study.mask_table import masks
from lit_dps.study.preflight.check import check_study
from lit_dps.study.setup import StudySetup

# Sparsities of the table if neither the study nor an option names any.
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


def main(command: CommandLine) -> int:
    """Print the masks of a study, and write their tables and figures."""
    cli = StudyCLI(command, MasksOptions)
    options = take_options(cli.config, MasksOptions)
    setup = cli.setup()
    sparsities = _sparsities(options, setup, command)
    check_study(setup)
    name = f"{setup.study.name}-masks"
    folder = Path(options.output or figures_folder(setup.storage.folder, name))
    rows = layer_rows(masks(setup, sparsities, options.points))
    tables = tables_of(rows)
    files = _write(tables, folder)
    shown = tables.get("collapse", rows).drop(columns=["collapses"], errors="ignore")
    print("\n".join(aligned(_texts(shown))))
    print(f"\n{listing(files, collapse_notes(rows))}", end="")
    return 0


def _sparsities(options: MasksOptions, setup: StudySetup, command: CommandLine) -> list[float]:
    """Return the sparsities of the masks, sorted: of `--at`, else of the study, else defaults."""
    if options.at is not None:
        sparsities = options.at
    elif command.value("study.sparsities") is not None or SPARSITY_KEY in setup.study.grid:
        sparsities = setup.study.sparsities
    else:
        sparsities = list(SPARSITIES)
    for sparsity in sparsities:
        check_sparsity("--at", sparsity)
    if not any(sparsities):
        raise ConfigError("--at", sparsities, "at least one sparsity above 0")
    return sorted(set(sparsities))


def _write(tables: dict[str, pd.DataFrame], folder: Path) -> list[Path]:
    """Write tables and their figures, and return the files."""
    files = []
    for name, table in tables.items():
        file = folder / f"{name}.csv"
        write_csv(table, file)
        files.append(file)
    for name, figure in figures(tables):
        without_math(figure)
        files += save(figure, folder, name)
    return files


def _texts(table: pd.DataFrame) -> list[dict[str, str]]:
    """Return the rows of a table with their values as texts."""
    rows = []
    for row in table.to_dict("records"):
        texts = {}
        for key, value in row.items():
            texts[str(key)] = text_of(value)
        if "layer" in row:
            texts["layer"] = str(row["layer"])
        rows.append(texts)
    return rows
