"""merge: add trials of the same studies that were run elsewhere.

Results of several machines join this way. Stored trials stay. A study of the same name must have
the same configuration. MLflow is unchanged: `analyze --sync` updates it. Needs no PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.options import TRUST
from lit_dps.cli.parser import new_parser
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import escape
from lit_dps.core.trial import Cell
from lit_dps.storage.merge import Merged, merge
from lit_dps.storage.read import UNPACKED_BYTES, open_elsewhere
from lit_dps.storage.urls import check_place, check_writable

UNPACKED = "Largest size of a compressed file when unpacked, in GB (10^9 bytes)."
OTHER = "an Optuna storage URL, or the path of a sqlite file, which may be compressed (.db.xz)"


def main(command: CommandLine) -> int:
    """Merge studies, and print what was added."""
    parser = new_parser(command, __doc__)
    parser.add_argument(
        "others", type=str, nargs="*", metavar="OTHER", help=f"Where to take trials from: {OTHER}."
    )
    parser.add_argument(
        "--study", type=str, metavar="NAME", help="The one study to merge; by default all."
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--unpacked_gb", type=float, default=UNPACKED_BYTES / 1e9, help=UNPACKED)
    config = parser.read_command()
    if not config.others:
        raise UserError(f"OTHER is missing; it must be {OTHER}", key="OTHER")
    if not 0 < config.unpacked_gb < math.inf:
        raise ConfigError("--unpacked_gb", config.unpacked_gb, "a size above 0, in GB")
    url = config.storage.optuna_url
    check_place(url)
    check_writable(url)
    max_bytes = int(config.unpacked_gb * 1e9)
    merged = merge_storages(url, config.others, config.study, max_bytes, config.trust)
    for name, study in merged.items():
        print(escape("\n".join(lines(name, study))))
    return 0


def merge_storages(
    url: str,
    others: Sequence[str],
    study: str | None,
    max_bytes: int = UNPACKED_BYTES,
    trust: bool = False,
) -> dict[str, Merged]:
    """Merge the studies of other storages into a storage.

    Args:
        url: Optuna storage URL of the storage.
        others: URLs or sqlite files of the others.
        study: The one study to merge; None for all.
        max_bytes: Largest size of a compressed file when unpacked.
        trust: As in `read_study`.

    Returns:
        What was merged, by name of the study.
    """
    with ExitStack() as stack:
        opened = []
        for other in dict.fromkeys(others):
            opened.append(stack.enter_context(open_elsewhere(other, url, max_bytes)))
        return merge(url, opened, study, trust)


def lines(name: str, study: Merged) -> list[str]:
    """Return a line about a merged study, and one for each cell with conflicting trials."""
    conflicts = sum(map(len, study.conflicts.values()))
    counts = (
        f"{_count(study.added, 'trial')} taken over, {study.unchanged} known already, "
        f"{_count(conflicts, 'conflict')}"
    )
    return [f"study {name}: {counts}", *(_conflict_line(study, cell) for cell in study.conflicts)]


def _conflict_line(study: Merged, cell: Cell) -> str:
    conflicts = study.conflicts[cell]
    first = conflicts[0]
    other_k = sum(conflict.k_differs for conflict in conflicts)
    repeat = ""
    if first.repeat:
        repeat = f" repeat {first.repeat}"
    return (
        f"  {cell}: {_count(len(conflicts), 'trial')} ended otherwise elsewhere, the first at "
        f"sample {first.point}{repeat} in {first.place}; what was here is kept; K differs in "
        f"{other_k}"
    )


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"
