"""configs: lists the configuration files that come with the package, or copies some of them
here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lit_dps.cli.parser import PlainParser
from lit_dps.cli.shipped import FOLDER, find, names, summary
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import closest_name

WIDTH = 100  # characters of a line of the list


def main(argv: list[str]) -> int:
    """Runs the verb; argv[0] is "configs"."""
    parser = PlainParser(prog="lit-dps configs", description=__doc__)
    parser.add_argument(
        "names",
        type=str,
        nargs="*",
        metavar="NAME",
        help="Files to copy; without any, all are listed.",
    )
    parser.add_argument("--to", type=str, default=".", help="Folder that they are copied to.")
    config = parser.parse_args(argv[1:])
    if not config.names:
        print(listing(), end="")
        return 0
    folder, files = Path(config.to), [_found(name) for name in config.names]
    targets = [folder / file.name for file in files]
    modules = {folder / module.name: module for file in files for module in modules_of(file)}
    for target in (*targets, *modules):
        if target.exists():
            raise ConfigError(
                "--to", str(folder), f"a folder without {target.name}: that is there already"
            )
    if len(set(targets)) < len(targets):
        raise ConfigError(
            "NAME",
            config.names,
            "names whose last parts differ: each is copied to a file of that name",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file, target in zip(files, targets, strict=True):
        shutil.copyfile(file, target)
        print(f"copied: {target}; lit-dps study {target} runs it")
    for target, module in modules.items():
        shutil.copyfile(module, target)
        print(
            f"copied: {target}, which that names; run it where this lies, or with its folder in "
            "PYTHONPATH"
        )
    return 0


def listing() -> str:
    """The names, each with what its file says of itself."""
    across = max(map(len, names())) + 2
    lines = []
    for name in names():
        said = summary(FOLDER / f"{name}.yaml")
        room = WIDTH - across - 2
        lines.append(
            f"  {name:{across}}{said if len(said) <= room else said[: room - 3].rpartition(' ')[0] + ' ...'}"
        )
    return "\n".join(
        [*(line.rstrip() for line in lines), "", "lit-dps configs NAME copies a file here", ""]
    )


def modules_of(file: Path) -> list[Path]:
    """The Python files beside a configuration whose classes it names."""
    text = file.read_text(encoding="utf-8")
    return [
        path for path in sorted(file.parent.glob("*.py")) if re.search(rf"\b{path.stem}\.\w", text)
    ]


def _found(name: str) -> Path:
    if (file := find(name)) is None:
        near = closest_name(name, names())
        told = f"; did you mean {near}?" if near else ""
        raise ConfigError("NAME", name, f"a name of the list that `lit-dps configs` prints{told}")
    return file
