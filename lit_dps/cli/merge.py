"""merge: take over trials of the same studies that were run elsewhere, so that results of several
machines join.

What is stored already stays. A study of the same name has to have been made with the same
configuration. MLflow is not touched: analyze --sync brings it in step. Needs no torch.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

from lit_dps.cli.parser import CommandError, PlainParser
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import escape
from lit_dps.core.trial import Cell
from lit_dps.storage.merge import Merged, merge
from lit_dps.storage.read import UNPACKED_BYTES, open_elsewhere
from lit_dps.storage.urls import check_place, check_writable

UNPACKED = "Largest size of a compressed file when unpacked, in GB (10^9 bytes)."
OTHER = "an Optuna storage URL, or the path of a sqlite file, which may be compressed (.db.xz)"


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "merge"."""
    parser = PlainParser(prog="lit-dps merge", description=__doc__)
    parser.add_argument(
        "others", type=str, nargs="*", metavar="OTHER", help=f"Where to take over from: {OTHER}."
    )
    parser.add_argument(
        "--study", type=str, metavar="NAME", help="The one study to take over; by default all."
    )
    parser.add_argument("--unpacked_gb", type=float, default=UNPACKED_BYTES / 1e9, help=UNPACKED)
    parser.add_class_arguments(StorageConfig, "storage")
    config = parser.instantiate_classes(parser.parse_args(argv[1:]))
    if not config.others:
        raise CommandError(f"OTHER is missing: {OTHER}")
    if not 0 < config.unpacked_gb < math.inf:
        raise ConfigError("--unpacked_gb", config.unpacked_gb, "a size above 0, in GB")
    url = config.storage.optuna_url
    check_place(url)
    check_writable(url)
    with ExitStack() as stack:
        others = []
        for other in dict.fromkeys(config.others):
            others.append(
                stack.enter_context(open_elsewhere(other, url, int(config.unpacked_gb * 1e9)))
            )
        merged = merge(url, others, config.study)
    for name, study in merged.items():
        print(escape("\n".join(lines(name, study))))
    return 0


def lines(name: str, study: Merged) -> list[str]:
    """What became of a study: a line, and one for each cell with trials that ended otherwise."""
    conflicts = sum(map(len, study.conflicts.values()))
    told = (
        f"{_count(study.added, 'trial')} taken over, {study.unchanged} known already, "
        f"{_count(conflicts, 'conflict')}"
    )
    return [f"study {name}: {told}", *(_conflict_line(study, cell) for cell in study.conflicts)]


def _conflict_line(study: Merged, cell: Cell) -> str:
    conflicts = study.conflicts[cell]
    first, differ = conflicts[0], sum(conflict.k_differs for conflict in conflicts)
    again = f" repeat {first.repeat}" if first.repeat else ""
    return (
        f"  {cell}: {_count(len(conflicts), 'trial')} ended otherwise elsewhere, the first at "
        "point "
        f"{first.point}{again} in {first.place}; what was here is kept; K differs in {differ}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
