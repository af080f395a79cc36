"""The configuration files that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

import lit_dps
from lit_dps.core.text import closest_name

FOLDER = Path(lit_dps.__file__).parent / "configs"


def names() -> list[str]:
    """The names of all files, the first one to try first: quickstart, ..., studies/width."""
    found = (path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))
    return sorted(found, key=lambda name: (name != "quickstart", name.count("/"), name))


def find(name: str) -> Path | None:
    """The file of a name, which may be the last part of one, or a path such as
    configs/quickstart.yaml."""
    wanted = name.removesuffix(".yaml").removesuffix(".yml").rpartition("configs/")[2]
    found = [each for each in names() if each == wanted or each.rpartition("/")[2] == wanted]
    exact = wanted in found
    return FOLDER / f"{wanted if exact else found[0]}.yaml" if exact or len(found) == 1 else None


def how_to_get(file: str | Path) -> str:
    """What to add to an error about a file that is not there, if the package has one of that name,
    or one near it."""
    name = str(file)
    if (found := find(name)) is None:
        stem = Path(name).stem
        near = closest_name(stem, [each.rpartition("/")[2] for each in names()])
        if near is None or (found := find(near)) is None:
            return ""
    own = found.relative_to(FOLDER).with_suffix("").as_posix()
    return f"; `lit-dps configs {own}` copies that of the package here"


def summary(path: Path) -> str:
    """The first sentence of the comment that a file begins with; empty without one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return re.split(r"(?<!al)[.?] (?=[A-Z(])", " ".join(comment))[0].rstrip(".")
