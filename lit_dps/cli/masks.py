"""masks: show what pruning methods keep of each layer at initialization.

It computes the masks of a study's methods. It trains and stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.analysis.layers import layer_rows
from lit_dps.analysis.tables import aligned, write_csv
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.options import MasksOptions, take_options
from lit_dps.cli.study import StudyCLI
from lit_dps.core.atomic_write import check_folder
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.core.errors import ConfigError
from lit_dps.core.progress_line import ProgressLine
from lit_dps.core.trial import Series, Trial, check_sparsity, text_of
from lit_dps.pruning.pruner import Scores
from lit_dps.report.figures.layers import collapse_notes, figures, tables_of
from lit_dps.report.figures.style import without_math
from lit_dps.report.figures.write import save
from lit_dps.report.publish import figures_folder, listing
from lit_dps.study.preflight.check import check_study
from lit_dps.study.probe_run import EndProbe
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.hidden_state import preserve_rng_state

# Sparsities of the table if neither the study nor an option names any.
SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)


def main(command: CommandLine) -> int:
    """Print the masks of a study, and write their tables and figures."""
    cli = StudyCLI(command, MasksOptions)
    options = take_options(cli.config, MasksOptions)
    if options.output is not None:
        check_folder("--output", Path(options.output))
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
    key = "--at"
    if options.at is not None:
        sparsities = options.at
    elif command.value("study.sparsities") is not None or SPARSITY_KEY in setup.study.grid:
        key = "study.sparsities"
        sparsities = setup.study.sparsities
    else:
        sparsities = list(SPARSITIES)
    for sparsity in sparsities:
        check_sparsity(key, sparsity)
    if not any(sparsities):
        raise ConfigError(key, sparsities, "at least one sparsity above 0")
    return sorted(set(sparsities))


def masks(
    setup: StudySetup, sparsities: Sequence[float], points: int
) -> Iterator[tuple[Series, int, dict[str, tuple[int, int]]]]:
    """Yield series, point, and the kept and all elements of each tensor.

    The study's trials have the same masks at its smallest batch size; a mask does not depend on the
    batch size. Scores that are valid for every sparsity are computed once a point.

    Args:
        setup: The study, checked.
        sparsities: Sparsities in place of the study's.
        points: The number of points.

    Raises:
        UserError: if a network cannot be pruned.
    """
    study, settings = setup.study, setup.trial_settings()
    smallest = min(study.batch_sizes)
    cells = {replace(cell, batch_size=smallest, sparsity=0.0): None for cell in study.cells}
    levels = [sparsity for sparsity in sparsities if sparsity > 0]
    progress, done = ProgressLine("masks made", len(cells) * points * len(levels)), 0
    for cell in cells:
        for point in range(points):
            params = setup.sample(point)
            scores: tuple[tuple[int, ...], Scores] | None = None
            for sparsity in levels:
                progress.update(done)
                trial = Trial(replace(cell, sparsity=sparsity), point, params, study.seed)
                pruning = settings.pruning_callback(trial)
                pruning.init = "original"  # the mask does not depend on the initialization after it
                if scores is not None:
                    pruning.reuse(*scores)
                _prune(setup, trial, pruning)
                if pruning.key is not None and pruning.scores is not None:
                    scores = (pruning.key, pruning.scores)
                assert pruning.mask is not None
                done += 1
                yield trial.cell.series, point, pruning.mask.kept()
    progress.end()


def _prune(setup: StudySetup, trial: Trial, pruning: PruningCallback) -> None:
    """Begin a fit of a trial, and end it when the callback has made its mask."""
    built = setup.workload.build(trial)
    callbacks = [*built.trainer["callbacks"], pruning, _EndAfterPruning()]
    with preserve_rng_state(seed=trial.seed_for("order")), suppress(EndProbe):
        trainer = Trainer(**{**built.trainer, "callbacks": callbacks})
        trainer.fit(built.module, datamodule=built.data)


class _EndAfterPruning(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise EndProbe


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
