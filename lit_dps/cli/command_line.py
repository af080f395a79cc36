"""The one reader of a command line and its configuration files, before the parsers.

It expands short forms: a file without `--config`, and dotted keys below `study.space` and
`study.grid`. A study without a name gets the name of its configuration file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_dps.cli.shipped import how_to_get
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import closest_name

# verbs that take a study's configuration
CONFIGURED = ("fit", "validate", "test", "study", "advise", "masks", "analyze")
# verbs that read or write what is named after a study
NAMED = ("study", "advise", "masks", "analyze")
MAPPINGS = ("space", "grid")  # of `study`: by configuration key
# What a box of the space is made of (`lit_dps.core.search_space`)
PARTS = ("low", "high", "scale", "integer", "choices")
CONFIG_OPTIONS = ("--config", "-c")


class Option(NamedTuple):
    """A word of a command line as an option, with the text after `=` or else the next word."""

    name: str
    text: str

    @property
    def is_config(self) -> bool:
        """Whether the text is a configuration file."""
        return self.name in CONFIG_OPTIONS

    @property
    def value(self) -> Any:
        """The text as YAML reads it; 1e-3 is a number."""
        try:
            value = yaml.safe_load(self.text)
        except yaml.YAMLError:
            return self.text
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                return value
        return value


def options_of(words: Sequence[str]) -> Iterator[Option]:
    """Yield each word of a command line as an option; values are words too."""
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if not equals:
            text = "".join(words[i + 1 : i + 2])
        yield Option(name, text)


def read_config(file: str) -> dict[str, Any]:
    """Return the content of a configuration file; empty if it is unreadable or no mapping."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # `check_shape` or the parser reports the error
        return {}
    return content if isinstance(content, dict) else {}


def expand_short_forms(argv: list[str]) -> list[str]:
    """Return a command line without short forms; the verb comes first.

    Raises:
        UserError: if a file does not exist.
        StorageError: if the study has no name, and its storage cannot be read.
    """
    if argv[0] not in CONFIGURED:
        return argv
    words = _dotted(_files(argv[0], argv[1:]))
    if argv[0] in NAMED:
        words += _name_option(argv[0], words)
    return [argv[0], *words]


def study_and_storage(words: Sequence[str]) -> tuple[str, StorageConfig]:
    """Return the name of the study of a `expand_short_forms` command line, and its storage."""
    study = section_of(words, "study") or {}
    storage = section_of(words, "storage") or {}
    return study.get("name", StudyConfig.name), StorageConfig(**storage)


def _name_option(verb: str, words: Sequence[str]) -> list[str]:
    """Return the option that names a study after its last configuration file.

    The list is empty if the study has a name. Earlier versions named such a study "study". If the
    storage holds a study "study" and none with the name of the file, the name remains "study".
    """
    files = [Path(option.text) for option in options_of(words) if option.is_config]
    study = section_of(words, "study")
    if study is None or "name" in study or not files or not files[-1].is_file():
        return []
    name = files[-1].stem
    # Masks are not stored.
    stored = set() if verb == "masks" else _stored_names(words)
    if StudyConfig.name in stored and name not in stored:
        name = StudyConfig.name
    return [f"--study.name={name}"]


def _stored_names(words: Sequence[str]) -> set[str]:
    """Return the names of all studies and all advice in the storage of a command line."""
    section = section_of(words, "storage") or {}
    places = {key: section[key] for key in ("folder", "optuna") if section.get(key) is not None}
    if not all(isinstance(each, str) for each in places.values()):
        # The parser refuses these values.
        return set()
    from lit_dps.storage.advice_store import list_advice  # imports take time
    from lit_dps.storage.read import list_studies  # imports take time
    from lit_dps.storage.urls import sqlite_file  # imports take time

    url = StorageConfig(**places).optuna_url
    file = sqlite_file(url)
    if file is not None and not file.is_file():
        return set()
    return {*list_studies(url), *list_advice(url)}


def section_of(words: Sequence[str], section: str) -> dict[str, Any] | None:
    """Return the keys of a section in the files and options of a command line.

    Returns:
        None if the section is no mapping.
    """
    keys: dict[str, Any] = {}
    for option in options_of(words):
        if option.is_config:
            content = read_config(option.text).get(section, {})
            if isinstance(content, str):
                content = read_config(str(Path(option.text).parent / content))
        elif option.name == f"--{section}":
            content = option.value
            if isinstance(content, str):
                content = read_config(content)
        elif option.name.startswith(f"--{section}."):
            content = {option.name.removeprefix(f"--{section}."): option.text}
        else:
            continue
        if not isinstance(content, Mapping):
            return None
        keys |= content
    return keys


def _files(verb: str, words: list[str]) -> list[str]:
    """The words with `--config` before each file that they begin with."""
    given = []
    while words and not words[0].startswith("-"):
        file, *words = words
        if not Path(file).is_file():
            raise UserError(
                f"{verb}: no such file {file!r}; a configuration file is needed{how_to_get(file)}"
            )
        given += ["--config", file]
    return [*given, *words]


def _dotted(words: list[str]) -> list[str]:
    """Return the words with one `--study.space=...` in place of all options `--study.space.KEY`.

    The grid is treated in the same way.
    """
    known: dict[str, dict[str, Any]] = {name: {} for name in MAPPINGS}
    rest: list[str] = []
    changed: set[str] = set()
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        match = re.fullmatch(r"--study\.(space|grid)(?:\.(.+?))?", option)
        if not match and option not in CONFIG_OPTIONS:
            rest.append(word)
            continue
        if not equals:
            value = next(remaining, "")
        if match and match[2]:
            _set(known[match[1]], match[1], match[2], Option(option, value).value)
            changed.add(match[1])
            continue
        rest.append(f"{option}={value}" if equals or match else option)
        if not (equals or match):
            rest.append(value)
        # The last file or option replaces a whole mapping.
        if match:
            mappings = {match[1]: Option(option, value).value}
        else:
            study = read_config(value).get("study")
            mappings = study if isinstance(study, Mapping) else {}
        for name in MAPPINGS:
            if isinstance(mappings.get(name), Mapping):
                known[name] = dict(mappings[name])
    for name in MAPPINGS:
        if name in changed:
            rest.append(f"--study.{name}={json.dumps(known[name])}")
    return rest


def _set(known: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Set a key of a mapping, or one part of a box that the space contains."""
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
    name, last = key, ""
    if part in PARTS:
        name, last = box, f".{part}"
    near = closest_name(name, known)
    hint = f"; did you mean {near}{last}?" if near else ""
    keys = ", ".join(known) or "a key"
    allowed = f"a range such as {{low: 1e-4, high: 1}}, or {', '.join(PARTS)} of {keys}{hint}"
    raise ConfigError(f"study.{section}.{key}", value, allowed)
