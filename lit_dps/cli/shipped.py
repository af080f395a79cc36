"""The configuration files that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import lit_dps
from lit_dps.core.text import closest_name

FOLDER = Path(str(lit_dps.__file__)).parent / "configs"
# The space after the first sentence of a comment; "et al." does not end a sentence.
_SENTENCE_END = re.compile(r"(?<!al\.)(?<=[.?]) (?=[A-Z(])")
# The command in the comment of a file.
_COMMAND = re.compile(r"^#.*\blit-dps (\w+) --config", re.MULTILINE)


def names() -> list[str]:
    """Return the names of all files: quickstart first, then those in subfolders last."""
    unsorted = map(_name_of, FOLDER.rglob("*.yaml"))
    return sorted(unsorted, key=lambda name: (name != "quickstart", name.count("/"), name))


def _name_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").as_posix()


def find(name: str) -> Path | None:
    """Return the file of a name; None without a file of this name, or with several.

    Args:
        name: Such as studies/width, its last part, or a path such as configs/studies/width.yaml.
    """
    name = name.removesuffix(".yaml").removesuffix(".yml").rpartition("configs/")[2]
    if name in names():
        return FOLDER / f"{name}.yaml"
    matches = [each for each in names() if each.rpartition("/")[2] == name]
    if len(matches) != 1:
        return None
    return FOLDER / f"{matches[0]}.yaml"


def how_to_get(file: str | Path) -> str:
    """Return how to copy the file of the package that a missing file was probably meant to be.

    Returns:
        The end of an error message; "" if the package has no file of this or a similar name.
    """
    path = find(str(file))
    if path is None:
        near = closest_name(Path(file).stem, [name.rpartition("/")[2] for name in names()])
        if near is not None:
            path = find(near)
    if path is None:
        return ""
    return f"; `lit-dps configs {_name_of(path)}` copies a file of the package here"


def summary(path: Path) -> str:
    """Return the first sentence of the comment that a file begins with; "" without a comment."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return _SENTENCE_END.split(" ".join(comment))[0].rstrip(".")


def verb_of(path: Path) -> str:
    """Return the verb of the command in the comment of a file; "study" without one."""
    command = _COMMAND.search(path.read_text(encoding="utf-8"))
    return "study" if command is None else command[1]
