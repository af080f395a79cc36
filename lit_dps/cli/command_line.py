"""The command line and its configuration files, read once: every key with its value and source.

`CommandLine` expands short forms before a parser sees them: a file without `--config`, dotted keys
below `study.space` and `study.grid`, `--engine`, and former names of keys. A study without a name
gets the name of its configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_dps.cli.config_file import (
    SECTION_CLASSES,
    ConfigFile,
    Source,
    check_is_file,
    is_file,
    parse_config,
    read_config,
    split_key,
    split_last,
)
from lit_dps.cli.options import OPTIONS
from lit_dps.core.aliases import RENAMED_KEYS, warn_of_former_name
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.config_yaml import ConfigDumper, ConfigLoader
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.text import closest_name

# Verbs that take a study's configuration.
CONFIGURED = ("fit", "validate", "test", "study", "advise", "masks", "analyze")
# Verbs that read or write what is named after a study.
NAMED = ("study", "advise", "masks", "analyze")
# Verbs that take `--engine` for `--study.engine`.
WITH_ENGINE = ("study", "advise", "masks")
# Parts of a box of `study.space` (`lit_dps.core.search_space`).
BOX_PARTS = ("low", "high", "scale", "integer", "choices")
CONFIG_OPTIONS = ("--config", "-c")
MAPPINGS = ("study.space", "study.grid")


class Setting(NamedTuple):
    """A key that a file or an option sets: SECTION, SECTION.NAME, or an option of the verb."""

    key: str
    value: Any
    source: Source


@dataclass
class CommandLine:
    """A command: its verb, its options and the content of its configuration files.

    Args:
        argv: The words of the command; the verb is first.

    Attributes:
        verb: The verb.
        words: The words after the verb as the parsers take them, without short forms.
        files: The configuration files, by the text that names them in `words`.
        settings: All keys that files and options set; later ones win.
        former_keys: The former names of keys that the user wrote.

    Raises:
        UserError: if a file does not exist or is no configuration, or if one file sets a key under
            its former and its present name.
        ConfigError: if an option changes a part of a box that `study.space` does not contain.
    """

    argv: Sequence[str]
    verb: str = field(init=False)
    words: list[str] = field(init=False, default_factory=list)
    files: dict[str, ConfigFile] = field(init=False, default_factory=dict)
    settings: list[Setting] = field(init=False, default_factory=list)
    former_keys: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.verb, *words = self.argv
        self._sources: dict[str, Source] = {}
        # The mappings of `study`, and the names of the mappings that dotted options change.
        self._mappings: dict[str, dict[str, Any]] = {key: {} for key in MAPPINGS}
        self._changed_mappings: set[str] = set()
        if self.verb in CONFIGURED:
            words = self._with_config_options(words)
        while words:
            words = self._read_option(words)
        for key in MAPPINGS:
            if key in self._changed_mappings:
                text = yaml.dump(
                    self._mappings[key],
                    Dumper=ConfigDumper,
                    default_flow_style=True,
                    allow_unicode=True,
                    sort_keys=False,
                )
                self.words.append(f"--{key}={text.strip()}")
        if self.verb in NAMED:
            self._name_study()

    def warn_of_former_keys(self) -> None:
        """Print a line for each key that the user wrote with its former name."""
        for former in self.former_keys:
            warn_of_former_name(former, RENAMED_KEYS[former])

    # ---- What the command sets ----

    @property
    def is_retraining(self) -> bool:
        """Whether `fit --of` trains a trial of a stored study again."""
        return self.verb == "fit" and self.has("of")

    @property
    def reads_runs(self) -> bool:
        """Whether `advise --runs` answers from runs that exist, without a module and data."""
        return self.verb == "advise" and self.has("runs")

    def has(self, key: str) -> bool:
        """Return True if a key or an option of the verb is set, maybe without a value."""
        return any(setting.key == key for setting in self.settings)

    def value(self, key: str) -> Any:
        """Return the value of a key SECTION.NAME; None if nothing sets it."""
        for setting in reversed(self.settings):
            if setting.key == key:
                return setting.value
        return None

    def nested_value(self, key: str) -> Any:
        """Return the value of a dotted key at any depth, without "init_args"; None if unset."""
        for setting in reversed(self.settings):
            above = _without_init_args(setting.key)
            if above != key and not key.startswith(f"{above}."):
                continue
            node = setting.value
            for name in key.removeprefix(above).split(".")[1:]:
                node = _child(node, name)
            if node is not None:
                return node
        return None

    def written_value(self, key: str, text: str) -> Any:
        """Return the value of a key, or the item of its list, that a parser shows as a text.

        The parser does not distinguish the number 1.5 from the text '1.5'.
        """
        value = self.nested_value(key)
        items = value if isinstance(value, list) else []
        for candidate in (value, *items):
            if str(candidate) == text:
                return candidate
        return text

    def written_name(self, key: str) -> str:
        """Return a key as the user wrote it: an option of the verb has dashes, `--at`."""
        source = self.source(key.replace("_", "-"))
        if "." not in key and source is not None and source.is_option:
            return source.name
        return key

    def section(self, name: str) -> dict[str, Any] | None:
        """Return the keys that files and options set in a section; None if it is no mapping."""
        keys = {}
        for setting in self.settings:
            if setting.key == name:
                return None
            if setting.key.startswith(f"{name}."):
                keys[setting.key.removeprefix(f"{name}.")] = setting.value
        return keys

    def source(self, key: str) -> Source | None:
        """Return where a dotted key, or the keys above it, are set; None if nothing sets them."""
        while key:
            if key in self._sources:
                return self._sources[key]
            key = key.rpartition(".")[0]
        return None

    def with_source(self, error: UserError) -> str:
        """Return the message of an error, with the line of the file that sets its key."""
        if error.key is None:
            return str(error)
        source = self.source(error.key)
        for mapping in MAPPINGS:
            searched = self._sources.get(f"{mapping}.{error.key}")
            if searched is not None and self.nested_value(error.key) != error.value:
                source = searched
        if source is None or source.is_option:
            return str(error)
        return f"{error} ({source})"

    @property
    def study_name(self) -> str:
        """The name of the study."""
        return (self.section("study") or {}).get("name", StudyConfig.name)

    @property
    def storage(self) -> StorageConfig:
        """Where the study is kept."""
        return StorageConfig(**self.section("storage") or {})

    @property
    def urls(self) -> list[str]:
        """All URLs of the command and of its configuration files; they may contain passwords."""
        urls = [word for word in self.argv if "://" in word]
        for setting in self.settings:
            if setting.key in ("storage.optuna", "storage.mlflow") and setting.value:
                urls.append(str(setting.value))
        return urls

    # ---- Reading ----

    def _with_config_options(self, words: list[str]) -> list[str]:
        """Return the words with `--config` before each file that they begin with."""
        options = []
        while words and not words[0].startswith("-"):
            file, *words = words
            if self.verb == "advise" and file.endswith((".csv", ".tsv")):
                raise UserError(
                    f"{file} is a table and no configuration. To read runs from it, write lit-dps "
                    f"advise --runs {file}.",
                    key="--runs",
                    hint=f"--runs {file}",
                    value=file,
                )
            check_is_file(file, self.verb)
            options += ["--config", file]
        return [*options, *words]

    def _read_option(self, words: list[str]) -> list[str]:
        """Read the first word, and the value after it; return the words that remain."""
        word, *remaining = words
        has_equals = "=" in word
        option = word.partition("=")[0]
        key = option.removeprefix("--")
        text = word.removeprefix(option).removeprefix("=")
        if not has_equals and remaining:
            text = remaining[0]
        is_key = option.startswith("--") and self.verb in CONFIGURED
        if option in CONFIG_OPTIONS and self.verb in CONFIGURED:
            self._read_config(option, text, has_equals)
        elif is_key and key in SECTION_CLASSES:
            self._read_section(option, key, text)
        elif is_key and _is_in_mapping(key):
            self._change_mapping(key, option_value(text))
        elif is_key and _is_our_key(key):
            self._read_key(option, key, text)
        elif option == "--engine" and self.verb in WITH_ENGINE:
            self._read_key(option, "study.engine", text)
        else:
            # An option whose value, if it takes one, is the next word.
            self.words.append(word)
            if option.startswith("--"):
                self._set(key, _value_of_type(_type_of(self.verb, key), text), Source(option))
            return remaining
        if has_equals:
            return remaining
        return remaining[1:]

    def _read_config(self, option: str, text: str, has_equals: bool) -> None:
        """Read `--config FILE`, or a configuration in place of the name of a file."""
        if not is_file(text) and (":" in text or "\n" in text):
            file = parse_config(text, option)
            text = file.text
        else:
            file = read_config(text, self.verb)
            self.files[text] = file
        if has_equals:
            self.words.append(f"{option}={text}")
        else:
            self.words += [option, text]
        self._add_content(file)

    def _read_section(self, option: str, section: str, text: str) -> None:
        """Read `--SECTION FILE` or `--SECTION KEYS` of a section of this package."""
        if text.endswith((".yaml", ".yml")):
            file = read_config(text, self.verb, section)
        else:
            file = parse_config(text, option, section)
        self.words.append(f"{option}={file.text}")
        self._add_content(file)

    def _read_key(self, option: str, key: str, text: str) -> None:
        """Read `--SECTION.NAME VALUE`, with a former name of the key too."""
        if key in RENAMED_KEYS:
            self.former_keys.append(key)
            key = RENAMED_KEYS[key]
        self.words.append(f"--{key}={text}")
        value = _value_of_type(_type_of(self.verb, key), text)
        if key in MAPPINGS and isinstance(value, Mapping):
            self._mappings[key] = dict(value)
        self._set(key, value, Source(option))

    def _add_content(self, file: ConfigFile) -> None:
        """Add the keys of a configuration to those that were read before."""
        self.former_keys += file.former_keys
        self._sources |= file.sources
        for section, content in file.content.items():
            keys = {section: content}
            # A file may write study.grid on its first level.
            if isinstance(content, Mapping) and section not in MAPPINGS:
                keys = {f"{section}.{name}": value for name, value in content.items()}
            for key, value in keys.items():
                self._set(key, value, file.sources[key])
                if key in MAPPINGS and isinstance(value, Mapping):
                    self._mappings[key] = dict(value)

    def _set(self, key: str, value: Any, source: Source) -> None:
        self.settings.append(Setting(key, value, source))
        if source.is_option:
            self._set_source(key, source)

    def _set_source(self, key: str, source: Source) -> None:
        """Record where a key is set. An option that sets a key replaces the keys below it."""
        key = _without_init_args(key)
        for each in list(self._sources):
            if each.startswith(f"{key}."):
                del self._sources[each]
        self._sources[key] = source

    # ---- Short forms ----

    def _change_mapping(self, key: str, value: Any) -> None:
        """Set a key of `study.space` or `study.grid`, or one part of a box of the space."""
        source = Source(f"--{key}")
        name = ".".join(key.split(".")[:2])
        changed = key.removeprefix(f"{name}.")
        mapping = self._mappings[name]
        box, part = split_last(changed)
        if name == "study.space" and part in BOX_PARTS:
            if not isinstance(mapping.get(box), Mapping):
                _refuse_box(changed, value, mapping)
            changed, value = box, {**mapping[box], part: value}
            # The other parts of the box keep their sources.
            self._sources[f"{name}.{box}"] = source
        elif name == "study.space" and not isinstance(value, Mapping):
            _refuse_box(changed, value, mapping)
        mapping[changed] = value
        self._changed_mappings.add(name)
        self.settings.append(Setting(name, mapping, source))
        self._set_source(key, source)

    def _name_study(self) -> None:
        """Name a study without a name after its last configuration file."""
        study = self.section("study")
        if study is None or "name" in study or not self.files:
            return
        name = Path(list(self.files)[-1]).stem
        self.words.append(f"--study.name={name}")
        self._set("study.name", name, Source("--study.name"))


def option_value(text: str) -> Any:
    """Return the value of an option as jsonargparse reads it; 1e-3 is a number."""
    try:
        value = yaml.load(text, Loader=ConfigLoader)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _is_our_key(key: str) -> bool:
    """Return True for SECTION.NAME in a section of this package."""
    section, name = split_key(key)
    return section in SECTION_CLASSES and bool(name) and not name.endswith((".help", "+"))


def _is_in_mapping(key: str) -> bool:
    """Return True for a key below `study.space` or `study.grid`."""
    return any(key.startswith(f"{mapping}.") for mapping in MAPPINGS)


def _type_of(verb: str, key: str) -> str | None:
    """Return the annotation of a key or of an option of a verb; None if it is unknown here."""
    section, name = split_key(key)
    cls = SECTION_CLASSES.get(section)
    if not name:
        cls, name = OPTIONS.get(verb), key.replace("-", "_")
    if cls is None:
        return None
    return {each.name: str(each.type) for each in fields(cls)}.get(name)


def _value_of_type(annotation: str | None, text: str) -> Any:
    """Return the value of an option; of a text as it is written, although it looks like a number.

    Args:
        annotation: The type of the option; None if it is unknown.
        text: What the user wrote.
    """
    if annotation == "str" or (annotation == "str | None" and text != "null"):
        return text
    return option_value(text)


def _without_init_args(key: str) -> str:
    """Return a dotted key as options name it: model.init_args.lr is model.lr too."""
    return ".".join(name for name in key.split(".") if name != "init_args")


def _child(node: Any, name: str) -> Any:
    """Return the value of a name in a mapping or in its `init_args`; None without one."""
    for mapping in (node, node.get("init_args") if isinstance(node, Mapping) else None):
        if isinstance(mapping, Mapping) and name in mapping:
            return mapping[name]
    return None


def _refuse_box(key: str, value: Any, space: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option below `study.space` that names no box and no part of one."""
    name, suffix = key, ""
    box, part = split_last(key)
    if part in BOX_PARTS:
        name, suffix = box, f".{part}"
    hint = None
    near = closest_name(name, space)
    if near is not None:
        hint = f"Did you mean {near}{suffix}?"
    keys = ", ".join(space) or "a key"
    allowed = f"a range such as {{low: 1e-4, high: 1}}, or {', '.join(BOX_PARTS)} of {keys}"
    raise ConfigError(f"study.space.{key}", value, allowed, hint)
