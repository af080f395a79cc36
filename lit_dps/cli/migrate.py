"""migrate: convert studies of earlier versions to the present format.

A SQLite file is converted in place, after a copy of it was written beside it. A compressed file
(.db.xz) is converted to a new file. While a process works on a study of the storage, nothing is
converted. Needs no PyTorch.
"""

from __future__ import annotations

from pathlib import Path

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.parser import new_parser
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.text import escape
from lit_dps.storage.migrate import Migration, migrate, migrate_packed
from lit_dps.storage.schema import FORMAT
from lit_dps.storage.take_over import TAKE_OVER

STORAGE = (
    "The storage: an Optuna URL, a SQLite file (.db, or compressed .db.xz), or a storage folder."
)
TAKES_OVER = (
    "Convert a study although a process of another host, which does not answer, may still run its "
    "trials."
)


def main(command: CommandLine) -> int:
    """Convert studies, and print a line for each."""
    parser = new_parser(command, __doc__)
    parser.add_argument("--storage", type=str, default=StorageConfig().optuna_url, help=STORAGE)
    parser.add_argument(
        "--study", type=str, metavar="NAME", help="The study to convert; by default all."
    )
    parser.add_argument(TAKE_OVER, action="store_true", help=TAKES_OVER)
    config = parser.parse_args(command.words)
    place = config.storage
    if place.endswith(".xz"):
        migration, file = migrate_packed(Path(place), config.study)
    else:
        migration = migrate(_url_of(place), config.study, config.take_over)
        file = None
    for line in report(migration, file):
        print(escape(line))
    return 0


def _url_of(place: str) -> str:
    """Return the Optuna URL of a URL, a SQLite file or a storage folder."""
    if "://" in place:
        return place
    if Path(place).is_dir():
        return StorageConfig(folder=place).optuna_url
    return f"sqlite:///{place}"


def report(migration: Migration, file: Path | None) -> list[str]:
    """Return a line for each file that was written, and for each study."""
    lines = []
    if migration.backup is not None:
        lines.append(f"copy of the storage from before: {migration.backup}")
    for name, trials in migration.converted.items():
        lines.append(f"study {name}: converted to format {FORMAT}, trials: {trials}")
        if name == StudyConfig.name:
            # Format 1 gave this name to each study whose configuration has no study.name.
            lines.append(f"to resume it, add study.name: {name} to its configuration file")
    for name in migration.unchanged:
        lines.append(f"study {name}: has format {FORMAT} already")
    if file is not None:
        lines.append(f"written: {file}")
    return lines or ["no studies there"]
