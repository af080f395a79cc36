"""figures: draw the figures of a study, or a comparison of several studies.

It reads the storage alone, and needs no PyTorch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path
from types import ModuleType

from jsonargparse import Namespace

from lit_dps.analysis.analysis import Analysis
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.options import TRUST
from lit_dps.cli.parser import new_parser
from lit_dps.core.atomic_write import check_folder
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import terminal_width
from lit_dps.report.figures import COMPARISONS, FIGURES, of_others, write_comparison
from lit_dps.report.figures.page_size import REPORT, PageSize, page_size
from lit_dps.report.publish import (
    figures_folder,
    figures_of_files,
    goal_folder,
    listing,
    write_goals,
)
from lit_dps.storage.read import list_studies, read_study

ONLY = "Some figures, separated by commas: your modules (docs/extending.md), and of "
GOAL = (
    "Value of the goal's metric to evaluate at, easier than the goals of the studies; any value if "
    "their trials trained past the goal."
)
OUTPUT = (
    "Folder of the figures, by default FOLDER/figures/NAME. For several studies it gets the "
    "comparison, by default in FOLDER/figures/compare-NAMES, and a folder for each."
)
STYLE = (
    "Page that the figures are for: report; paper, as wide as a column or the page of a journal "
    "(3.25 or 6.75 inches); slides, 5 inches wide, to be enlarged. Figures of paper and slides "
    "have no caption, and their folder is below the folder of the report."
)
WIDTH = "Width of each figure in inches, in place of the width of --style. Fonts keep their size."
FORMAT = "Formats of the figures, separated by commas: png, pdf and svg."
LONGEST = 100  # characters of the folder name of a comparison
HASH_LENGTH = 8  # hexadecimal digits that make shortened names unique


def main(command: CommandLine) -> int:
    """Draw the figures of studies, and print their files."""
    config = _parse(command)
    formats = tuple(dict.fromkeys(map(str.strip, config.format.split(","))))
    with page_size(PageSize(config.style, config.width, formats)):
        return _draw(config)


def _draw(config: Namespace) -> int:
    """Draw the figures of the studies of a command line, and print their files."""
    if config.output is not None:
        check_folder("--output", Path(config.output))
    names = list(dict.fromkeys(config.names))
    url = config.storage.optuna_url
    if not names:
        stored = ", ".join(list_studies(url)) or "(none yet)"
        raise UserError(
            f"NAME is missing; it must be one or more of the studies {stored}.", key="NAME"
        )
    only = None
    if config.only is not None:
        only = _figures_of_option(config.only, len(names))
    studies = []
    for name in names:
        record = read_study(url, name, config.trust)
        studies.append(_at_goal(Analysis(record), config.goal))
    files: list[Path] = []
    notes: list[str] = []
    for name, study in zip(names, studies, strict=True):
        folder = _study_folder(config, name)
        further: tuple[list[ModuleType], list[str]] = ([], [])
        if only is None:
            further = figures_of_files(folder)
        written, study_notes = write_goals(study, folder, only, further[0])
        files += written
        study_notes += further[1]
        for note in study_notes:
            notes.append(f"{name}: {note}" if len(names) > 1 else note)
    if len(names) > 1:
        written, comparison_notes = write_comparison(studies, _comparison_folder(config), only)
        files += written
        notes += comparison_notes
    print(listing(files, notes, terminal_width()), end="")
    return 0


def _at_goal(study: Analysis, goal: float | None) -> Analysis:
    """Return a study at the goal of `--goal`; the study itself without one."""
    if goal is None:
        return study
    try:
        return study.at_goal(goal)
    except ConfigError as error:
        raise ConfigError("--goal", goal, error.allowed or "", error.hint) from error


def _parse(command: CommandLine) -> Namespace:
    parser = new_parser(command, __doc__)
    parser.add_argument("names", type=str, nargs="*", metavar="NAME", help="Names of studies.")
    parser.add_argument("--only", type=str, help=ONLY + ", ".join(_figure_names(2)))
    parser.add_argument("--goal", type=float, help=GOAL)
    parser.add_argument("--style", type=str, default=REPORT, help=STYLE)
    parser.add_argument("--width", type=float, help=WIDTH)
    parser.add_argument("--format", type=str, default="png,pdf", help=FORMAT)
    parser.add_argument("--output", type=str, help=OUTPUT)
    parser.add_argument("--trust", action="store_true", help=TRUST)
    return parser.read_command()


def _study_folder(config: Namespace, name: str) -> Path:
    """Return the folder of the figures of one study."""
    if config.output is None:
        return _default_folder(config, name)
    if len(set(config.names)) == 1:
        return Path(config.output)
    return Path(config.output) / figures_folder("", name).name


def _comparison_folder(config: Namespace) -> Path:
    """Return the folder of the figures that compare studies."""
    if config.output is not None:
        return Path(config.output)
    return _default_folder(config, comparison_name(list(dict.fromkeys(config.names))))


def _default_folder(config: Namespace, name: str) -> Path:
    folder = figures_folder(config.storage.folder, name)
    if config.goal is not None:
        folder = goal_folder(folder, config.goal)
    if config.style != REPORT:
        folder = folder / config.style
    return folder


def comparison_name(names: Sequence[str]) -> str:
    """Return the folder name of a comparison: the common beginning of the names, then the rests.

    A long name is shortened, and ends with a hash.
    """
    beginning = commonprefix(list(names)).rpartition("-")[0]
    parts = ["compare", *names]
    if beginning:
        parts = ["compare", beginning, *(name.removeprefix(f"{beginning}-") for name in names)]
    name = "-".join(parts)
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]
    return f"{name[: LONGEST - HASH_LENGTH - 1]}-{digest}"


def _figure_names(studies: int) -> list[str]:
    """Return the names of all figures of this number of studies."""
    figures = [*FIGURES]
    if studies > 1:
        figures += COMPARISONS
    return list(dict.fromkeys(figure.NAME for figure in figures))


def _figures_of_option(only: str, studies: int) -> list[str]:
    """Return the names that `--only` contains.

    Raises:
        ConfigError: for a name that is no figure of this number of studies and no module.
    """
    names = list(map(str.strip, only.split(",")))
    figures = _figure_names(studies)
    for name in names:
        if name in figures:
            continue
        allowed = f"any of {', '.join(figures)}, with commas between"
        if name in _figure_names(2):
            raise ConfigError(
                "--only", name, f"{allowed}. {name} compares several studies, so name several"
            )
        module = name.partition(".")[0]
        if not module or not find_spec(module):
            raise ConfigError("--only", name, allowed)
        of_others(name)
    return names
