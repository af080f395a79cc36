"""What may be written shorter on a command line, put into the words that the parsers know.

A file without `--config` before it, and keys below `study.space` and `study.grid`, whose own keys have dots in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.cli.keys import read
from lit_dps.cli.shipped import how_to_get
from lit_dps.errors import ConfigError, UserError, meant

# verbs that take a study's configuration
CONFIGURED = ("fit", "validate", "test", "study", "advise", "masks", "analyze")
MAPPINGS = ("space", "grid")  # of `study`: by configuration key
# What a box of the space is made of (`lit_dps.space`)
PARTS = ("low", "high", "scale", "integer", "choices")


def spelled_out(argv: list[str]) -> list[str]:
    """A command line, verb first, as the parsers take it. Raises UserError for a file that is not there."""
    if argv[0] not in CONFIGURED:
        return argv
    return [argv[0], *_dotted(_files(argv[0], argv[1:]))]


def _files(verb: str, words: list[str]) -> list[str]:
    """The words with `--config` before each file that they begin with."""
    given = []
    while words and not words[0].startswith("-"):
        file, *words = words
        if not Path(file).is_file():
            raise UserError(f"{verb}: no such file {file!r}; a configuration file is needed{how_to_get(file)}")
        given += ["--config", file]
    return [*given, *words]


def _dotted(words: list[str]) -> list[str]:
    """The words with one `--study.space=...` in place of all `--study.space.KEY...`, and likewise of the grid."""
    known: dict[str, dict[str, Any]] = {name: {} for name in MAPPINGS}
    rest, changed, left = [], set(), iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        match = re.fullmatch(r"--study\.(space|grid)(?:\.(.+?))?", option)
        if not match and option not in ("--config", "-c"):
            rest.append(word)
            continue
        if not equals:
            value = next(left, "")
        if match and match[2]:
            _set(known[match[1]], match[1], match[2], _parsed(value))
            changed.add(match[1])
            continue
        rest.append(f"{option}={value}" if equals or match else option)
        if not (equals or match):
            rest.append(value)
        for name in MAPPINGS:  # of several the last one stands
            whole = _parsed(value) if match and match[1] == name else None
            study = {} if match else read(value).get("study")
            found = whole if match else study.get(name) if isinstance(study, Mapping) else None
            if isinstance(found, Mapping):
                known[name] = {**found}
    return [*rest, *(f"--study.{name}={json.dumps(known[name])}" for name in MAPPINGS if name in changed)]


def _set(known: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Sets a key of a mapping; of the space also one part of a box that is there."""
    box, _, part = key.rpartition(".")
    if section == "grid" or part not in PARTS:
        if section == "space" and not isinstance(value, Mapping):
            _refuse(section, key, value, known)
        known[key] = value
        return
    if not isinstance(known.get(box), Mapping):
        _refuse(section, key, value, known)
    known[box] = {**known[box], part: value}


def _refuse(section: str, key: str, value: Any, known: Mapping[str, Any]) -> None:
    box, _, part = key.rpartition(".")
    named, last = (box, f".{part}") if part in PARTS else (key, "")
    near = meant(named, known)
    there = f"; did you mean {near}{last}?" if near else ""
    allowed = f"a range such as {{low: 1e-4, high: 1}}, or {', '.join(PARTS)} of {', '.join(known) or 'a key'}{there}"
    raise ConfigError(f"study.{section}.{key}", value, allowed)


def _parsed(text: str) -> Any:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(found, str):  # YAML takes 1e-3 for a word
        try:
            return float(found)
        except ValueError:
            return found
    return found
