"""Configuration files as YAML nodes: their keys with lines, and with the present names of keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lit_dps.cli.shipped import how_to_get
from lit_dps.core.aliases import RENAMED_KEYS
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.config_yaml import ConfigDumper, ConfigLoader
from lit_dps.core.errors import UserError
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.text import shorten
from lit_dps.core.trial_config import (
    BatchConfig,
    GoalConfig,
    OptimConfig,
    PruningConfig,
    SmoothnessConfig,
)

# The sections of a configuration whose keys are fields of a dataclass of this package.
SECTION_CLASSES: dict[str, type] = {
    "study": StudyConfig,
    "goal": GoalConfig,
    "pruning": PruningConfig,
    "optim": OptimConfig,
    "local": LocalSGDSchedule,
    "smoothness": SmoothnessConfig,
    "batch": BatchConfig,
    "storage": StorageConfig,
}


MERGE = "<<"  # the key of YAML that adds the keys of an anchor
NULL_TAG = "tag:yaml.org,2002:null"
TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class Source(NamedTuple):
    """Where a value comes from: an option, or a line of a file."""

    name: str
    line: int | None = None

    @property
    def is_option(self) -> bool:
        """Whether the value comes from an option."""
        return self.name.startswith("-")

    def __str__(self) -> str:
        if self.line is None:
            return self.name
        return f"{self.name}, line {self.line}"


class ConfigFile(NamedTuple):
    """The content of a configuration file.

    Attributes:
        content: The sections, with the present names of keys and with the files that sections name.
        text: The content as text, for the parser.
        sources: The line of every key, by dotted key without "init_args".
        former_keys: The former names of keys in the file.
    """

    content: dict[str, Any]
    text: str
    sources: dict[str, Source]
    former_keys: list[str]


def split_key(key: str) -> tuple[str, str]:
    """Return the section of a dotted key, and the name in the section; "" for a section."""
    section, _, name = key.partition(".")
    return section, name


def split_last(path: str) -> tuple[str, str]:
    """Return a dotted path without its last name, and this name."""
    parent, _, name = path.rpartition(".")
    return parent, name


def is_file(name: str) -> bool:
    """Return True if there is a file of this name; False for a text that is no valid name."""
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def check_is_file(name: str, verb: str) -> None:
    """Raise UserError if there is no file of this name, with the kind of what is there instead.

    Args:
        name: The name that a command gives for a configuration file.
        verb: The verb of the command, for the message.
    """
    if is_file(name):
        return
    problem = f"file {name!r} does not exist"
    if not name:
        problem = "--config names no file"
    elif os.path.isdir(name):
        problem = f"{name!r} is a folder"
    elif os.path.islink(name):
        problem = f"{name!r} is a link to {os.readlink(name)!r}, which does not exist"
    elif os.path.lexists(name):
        problem = f"{name!r} is no regular file"
    raise UserError(
        f"{verb}: {problem}. Give a configuration file{how_to_get(name)}",
        key="--config",
        value=name,
    )


def read_config(file: str, verb: str, section: str | None = None) -> ConfigFile:
    """Return the content of a configuration file.

    Args:
        file: Its name.
        verb: The verb of the command, for messages.
        section: The section that the file contains; None for a file of sections.

    Raises:
        UserError: if the file does not exist, or is no configuration; with line and column.
    """
    check_is_file(file, verb)
    return parse_config(_read_text(Path(file)), file, section, Path(file).parent)


def parse_config(
    text: str, name: str, section: str | None = None, folder: Path = Path()
) -> ConfigFile:
    """Return the content of a configuration.

    Args:
        text: The configuration as YAML.
        name: The file or the option that contains it, for messages.
        section: The section that the text contains; None for a text of sections.
        folder: The folder of files that sections name.

    Raises:
        UserError: if the text is no configuration; with line and column.
    """
    root = _compose(text, name)
    if root is None:
        # An empty file sets no key. jsonargparse refuses an empty text.
        return ConfigFile({}, "{}", {}, [])
    if section is not None:
        key = yaml.ScalarNode("tag:yaml.org,2002:str", section, root.start_mark)
        root = yaml.MappingNode("tag:yaml.org,2002:map", [(key, root)], root.start_mark)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(
            f"{name} contains {shorten(repr(_construct(root, name)))}; it must contain "
            "keys such as model, data and study. Copy a file by lit-dps configs --to "
            "FOLDER.",
            key=name,
            value=shorten(repr(_construct(root, name))),
        )
    former_keys: list[str] = []
    has_nested_files = False
    for i, (key, value) in enumerate(root.value):
        if key.value not in SECTION_CLASSES:
            continue
        nested = _nested_section(value, folder)
        if nested is not None:
            root.value[i] = (key, nested)
            has_nested_files = True
        former_keys += _rename_keys(key.value, root.value[i][1])
    content = {str(key): value for key, value in _construct(root, name).items()}
    sources: dict[str, Source] = {}
    _add_sources(root, "", sources)
    if former_keys or has_nested_files:
        node: yaml.Node = root
        if section is not None:
            node = root.value[0][1]
        text = yaml.serialize(node, Dumper=ConfigDumper, allow_unicode=True, width=10**6)
    return ConfigFile(content, text, sources, former_keys)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text in UTF-8 ({error}). Save it in UTF-8.", key=str(path)
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Check its permissions.", key=str(path)
        ) from error


def _compose(text: str, name: str) -> yaml.Node | None:
    """Return the root of a YAML text; None for an empty text and for null."""
    try:
        loader = ConfigLoader(text)
        loader.name = name  # of the marks
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _syntax_error(name, error) from error
    if isinstance(root, yaml.ScalarNode) and root.tag == NULL_TAG:
        return None
    if isinstance(root, yaml.MappingNode):
        _check_section_keys(root)
        _check_keys(root, (), set())
    return root


def _check_section_keys(root: yaml.MappingNode) -> None:
    """Raise UserError for a section or a key of a section that is no text, or a key given twice.

    A key can be below its section, `study: {trials: 8}`, or have a dotted name, `study.trials: 8`.
    """
    nodes: dict[str, yaml.Node] = {}
    for section, value in root.value:
        _check_is_text("", section)
        keys = [("", section)]
        if section.value in SECTION_CLASSES and isinstance(value, yaml.MappingNode):
            keys = [(f"{section.value}.", key) for key, _ in value.value]
        for prefix, key in keys:
            _check_is_text(prefix, key)
            path = f"{prefix}{key.value}"
            if path in nodes and key.value != MERGE:
                _refuse_duplicate(path, nodes[path], key)
            nodes[path] = key


def _check_keys(node: yaml.Node, parents: tuple[yaml.Node, ...], checked: set[yaml.Node]) -> None:
    """Raise UserError if a mapping below a node has a key twice, or contains itself.

    Args:
        node: The node.
        parents: The nodes that contain it.
        checked: Nodes that were checked before. An anchor may be used many times.
    """
    if node in parents:
        raise UserError(
            f"{_place(node)}: an anchor contains itself. Replace the alias in it by a value.",
            key=_place(node),
        )
    if node in checked:
        return
    checked.add(node)
    children = []
    if isinstance(node, yaml.MappingNode):
        keys: dict[tuple[str, str], yaml.Node] = {}
        for key, value in node.value:
            children.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.value == MERGE:
                continue
            if (key.tag, key.value) in keys:
                _refuse_duplicate(key.value, keys[key.tag, key.value], key)
            keys[key.tag, key.value] = key
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    for child in children:
        _check_keys(child, (*parents, node), checked)


def _check_is_text(prefix: str, key: yaml.Node) -> None:
    """Raise UserError for the key of a section that YAML reads as null, a number or a list."""
    if key.tag not in TEXT_TAGS:
        path = shorten(f"{prefix}{key.value}")
        raise UserError(
            f"{_place(key)}: the key {path} is not text. Write the name of a key, or quote it.",
            key=path,
        )


def _refuse_duplicate(key: str, first: yaml.Node, second: yaml.Node) -> None:
    """Raise UserError, because a key is there twice and one of its values would be ignored."""
    raise UserError(
        f"{key} is set twice: {_place(first)} and line {second.start_mark.line + 1}. "
        "Remove one of the two lines.",
        key=key,
    )


def _place(node: yaml.Node) -> str:
    """Return the file and the line of a node."""
    return f"{node.start_mark.name}, line {node.start_mark.line + 1}"


def _construct(node: yaml.Node, name: str) -> Any:
    """Return the value of a node."""
    try:
        return ConfigLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise _syntax_error(name, error) from error
    except ValueError as error:  # such as 0x_, a number without digits
        raise UserError(
            f"{name} is not valid YAML: {error}. Correct the file.", key=name
        ) from error


def _syntax_error(name: str, error: yaml.YAMLError) -> UserError:
    mark = getattr(error, "problem_mark", None)
    place = ""
    if mark is not None:
        place = f", line {mark.line + 1}, column {mark.column + 1}"
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return UserError(
        f"{name}{place}: {shorten(problem)}. The file is not valid YAML. Correct this "
        "line or the line before it.",
        key=name,
    )


def _nested_section(node: yaml.Node, folder: Path) -> yaml.Node | None:
    """Return the content of the file that a section names; None if it names no file."""
    if not isinstance(node, yaml.ScalarNode) or not node.value.endswith((".yaml", ".yml")):
        return None
    path = folder / node.value
    if not is_file(str(path)):
        return None
    nested = _compose(_read_text(path), str(path))
    if nested is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [], node.start_mark)
    return nested


def _rename_keys(section: str, node: yaml.Node) -> list[str]:
    """Give the keys of a section their present names; return the former names.

    Raises:
        UserError: if a key is there under both names.
    """
    if not isinstance(node, yaml.MappingNode):
        return []
    yaml.SafeLoader("").flatten_mapping(node)
    nodes = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            nodes[f"{section}.{key.value}"] = key
    former_keys = []
    for former, key in nodes.items():
        if former not in RENAMED_KEYS:
            continue
        present = RENAMED_KEYS[former]
        if present in nodes:
            raise UserError(
                f"{former} ({_place(key)}) is the former name of {present} "
                f"({_place(nodes[present])}), and both are set. Remove {former}.",
                key=former,
                hint=f"Remove {former}.",
            )
        key.value = present.removeprefix(f"{section}.")
        former_keys.append(former)
    return former_keys


def _add_sources(node: yaml.Node, prefix: str, sources: dict[str, Source]) -> None:
    """Add the lines of all keys below a node."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        sources[path] = Source(key.start_mark.name, key.start_mark.line + 1)
        if key.value == "init_args":
            path = prefix.removesuffix(".")
        _add_sources(value, f"{path}.", sources)
