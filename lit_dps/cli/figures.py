"""figures: the paper's figures of one study, or of several and how they compare, from storage
alone. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.parser import CommandError, PlainParser
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError
from lit_dps.report.figures import COMPARISONS, FIGURES, of_others, write_comparison
from lit_dps.report.publish import figures_folder, goal_folder, listing, write_goals
from lit_dps.storage.read import list_studies, read_study

ONLY = "Some figures, with commas between: modules of your own (docs/extending.md), and of "
GOAL = (
    "Value of the goal's metric to evaluate at, easier than the studies' own; any where their "
    "trials ran on."
)
LONGEST = 100  # characters of a comparison's folder name


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "figures"."""
    parser = PlainParser(prog="lit-dps figures", description=__doc__)
    parser.add_argument("names", type=str, nargs="*", metavar="NAME", help="Names of studies.")
    parser.add_argument("--only", type=str, help=ONLY + ", ".join(_figures(2)))
    parser.add_argument("--goal", type=float, help=GOAL)
    parser.add_argument(
        "--output",
        type=str,
        help="Folder of the figures, by default FOLDER/figures/NAME. Of several studies it gets "
        "the comparison, by "
        "default in FOLDER/figures/compare-NAMES, and a folder for each.",
    )
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    names, url = list(dict.fromkeys(config.names)), config.storage.optuna_url
    if not names:
        raise CommandError(
            "NAME is missing: one or more of the studies "
            f"{', '.join(list_studies(url)) or '(none yet)'}"
        )
    only = None if config.only is None else _chosen(config.only, len(names))
    studies = [Analysis(read_study(url, name)) for name in names]
    if config.goal is not None:
        studies = [study.at_goal(config.goal) for study in studies]

    def folder_of(name: str) -> Path:
        folder = figures_folder(config.storage.folder, name)
        return folder if config.goal is None else goal_folder(folder, config.goal)

    output, several = Path(config.output) if config.output else None, len(names) > 1
    files, notes = [], []
    for name, study in zip(names, studies, strict=True):
        folder = folder_of(name)
        if output is not None:
            folder = output / figures_folder("", name).name if several else output
        written, said = write_goals(study, folder, only)
        files += written
        notes += [f"{name}: {note}" for note in said] if several else said
    if several:
        written, said = write_comparison(studies, output or folder_of(comparison_name(names)), only)
        files += written
        notes += said
    print(listing(files, notes), end="")
    return 0


def comparison_name(names: Sequence[str]) -> str:
    """The folder of a comparison: what the names begin with is told once, and long ones are cut."""
    shared = commonprefix(list(names)).rpartition("-")[0]
    rests = [name.removeprefix(f"{shared}-") for name in names] if shared else names
    name = "-".join(["compare", *([shared] if shared else []), *rests])
    if len(name) <= LONGEST:
        return name
    # no two cut ones are alike
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _figures(studies: int) -> list[str]:
    """The names of all figures of as many studies."""
    return list(
        dict.fromkeys(figure.NAME for figure in (*FIGURES, *(COMPARISONS if studies > 1 else ())))
    )


def _chosen(only: str, studies: int) -> list[str]:
    names, known = [name.strip() for name in only.split(",")], _figures(studies)
    for name in names:
        if name in known:
            continue
        if name in _figures(2) or not (module := name.partition(".")[0]) or not find_spec(module):
            several = " (it compares several studies)" if name in _figures(2) else ""
            raise ConfigError(
                "--only", name, f"any of {', '.join(known)}, with commas between{several}"
            )
        of_others(name)
    return names
