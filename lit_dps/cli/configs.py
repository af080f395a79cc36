"""configs: list the configuration files of the package, or copy some here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.parser import new_parser
from lit_dps.cli.shipped import FOLDER, find, names, summary, verb_of
from lit_dps.core.atomic_write import check_folder
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import did_you_mean, for_terminal, terminal_width

MIN_SUMMARY_WIDTH = 30  # columns; a narrower summary has its own line


def main(command: CommandLine) -> int:
    """List or copy configuration files."""
    parser = new_parser(command, __doc__)
    parser.add_argument(
        "names",
        type=str,
        nargs="*",
        metavar="NAME",
        help="Files to copy; without any, all are listed.",
    )
    parser.add_argument("--to", type=str, default=".", help="Folder that they are copied to.")
    config = parser.parse_args(command.words)
    if config.names:
        _copy(config.names, Path(config.to))
    else:
        print(listing(terminal_width()), end="")
    return 0


def _copy(asked_names: Sequence[str], folder: Path) -> None:
    """Copy configurations, and the modules beside them that they name, into a folder."""
    check_folder("--to", folder)
    files = list(map(_file_of, asked_names))
    targets = []
    modules = {}
    for file in files:
        targets.append(folder / file.name)
        for module in modules_of(file):
            modules[folder / module.name] = module
    for target in (*targets, *modules):
        if target.exists():
            allowed = f"a folder without a file {target.name}, which exists there already"
            raise ConfigError("--to", str(folder), allowed)
    if len(set(targets)) < len(targets):
        allowed = "names whose last parts differ, because each is copied to a file of that name"
        raise ConfigError("NAME", asked_names, allowed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--to", str(folder), f"a folder that can be created ({error})") from error
    for file, target in zip(files, targets, strict=True):
        shutil.copyfile(file, target)
        print(for_terminal(f"copied: {target}; lit-dps {verb_of(file)} {target} runs it"))
    for target, module in modules.items():
        shutil.copyfile(module, target)
        message = (
            f"copied: {target}, a module that the configuration names; run the command in the "
            "folder of this file, or with the folder in PYTHONPATH"
        )
        print(for_terminal(message))


def listing(width: int) -> str:
    """Return the names of all files, each with the first sentence of its comment.

    Args:
        width: Columns of the terminal. A longer sentence is cut, and follows its name on a line of
            its own at a narrow terminal.
    """
    name_width = max(map(len, names())) + 2
    separator = ""
    summary_width = width - name_width - 2
    if summary_width < MIN_SUMMARY_WIDTH:
        name_width = 0
        separator = "\n      "
        summary_width = width - 6
    lines = []
    for name in names():
        sentence = summary(FOLDER / f"{name}.yaml")
        if len(sentence) > summary_width:
            sentence = sentence[: summary_width - 3].rpartition(" ")[0] + " ..."
        lines.append(f"  {name:{name_width}}{separator}{sentence}".rstrip())
    return "\n".join([*lines, "", "lit-dps configs NAME copies a file here", ""])


def modules_of(file: Path) -> list[Path]:
    """Return the Python files beside a configuration whose classes it names."""
    text = file.read_text(encoding="utf-8")
    modules = []
    for path in sorted(file.parent.glob("*.py")):
        if re.search(rf"\b{path.stem}\.\w", text):
            modules.append(path)
    return modules


def _file_of(name: str) -> Path:
    """Return the file of a name. Raises ConfigError for an unknown name."""
    file = find(name)
    if file is not None:
        return file
    hint = did_you_mean(name, names())
    raise ConfigError("NAME", name, "a name of the list that `lit-dps configs` prints", hint)
