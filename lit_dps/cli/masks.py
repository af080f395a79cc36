"""masks: what the pruning methods of a study keep of each layer, at initialization; nothing is
trained or stored."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser

from lit_dps.analysis.layers import layer_rows
from lit_dps.analysis.tables import aligned, write_csv
from lit_dps.cli.study import StudyCLI
from lit_dps.core.config import SPARSITY_KEY
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import check_sparsity, text_of
from lit_dps.report.figures.layers import collapse_notes, figures, tables_of
from lit_dps.report.figures.style import without_math
from lit_dps.report.figures.write import save
from lit_dps.report.publish import figures_folder, listing
from lit_dps.study.mask_table import masks
from lit_dps.study.run import check_study

SPARSITIES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
AT = "Sparsities, in place of study.sparsities; without either nine from 0.5 to 0.999."


class MasksCLI(StudyCLI):
    """A study's configuration, and which masks are made."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--at", type=list[float] | None, default=None, help=AT)
        parser.add_argument(
            "--points",
            type=int,
            default=3,
            help="Points of the search, each with weights of its own.",
        )
        parser.add_argument(
            "--output",
            type=str,
            default=SUPPRESS,
            help="Folder; by default FOLDER/figures/NAME-masks.",
        )


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "masks"."""
    sys.argv = ["lit-dps masks", *argv[1:]]
    cli = MasksCLI(run=False, seed_everything_default=False)
    sparsities, points, output = (cli.config.pop(key, None) for key in ("at", "points", "output"))
    setup = cli.setup()
    if sparsities is None:
        asked = cli.parser.parse_args(cli.args, defaults=False)
        own = asked.get("study.sparsities") is not None or SPARSITY_KEY in setup.study.grid
        sparsities = setup.study.sparsities if own else list(SPARSITIES)
    for sparsity in sparsities:
        check_sparsity("--at", sparsity)
    if not any(sparsities):
        raise ConfigError("--at", sparsities, "at least one sparsity above 0")
    if points < 1:
        raise ConfigError("--points", points, "at least 1")
    check_study(setup)
    folder = Path(output or figures_folder(setup.storage.folder, f"{setup.study.name}-masks"))
    rows = layer_rows(masks(setup, sorted(set(sparsities)), points))
    tables, files = tables_of(rows), []
    for name, table in tables.items():
        files.append(folder / f"{name}.csv")
        write_csv(table, files[-1])
    for name, figure in figures(tables):
        without_math(figure)
        files += save(figure, folder, name)
    shown = (
        tables.get("collapse", rows).drop(columns=["collapses"], errors="ignore").to_dict("records")
    )
    text = (
        {key: str(value) if key == "layer" else text_of(value) for key, value in row.items()}
        for row in shown
    )
    print("\n".join(aligned(text)))
    print(f"\n{listing(files, collapse_notes(rows))}", end="")
    return 0
