"""Refuses mistyped keys and values of the wrong kind, before PyTorch is imported.

Importing PyTorch takes seconds. The keys of a section are the fields of its dataclass; the keys of
`trainer` are read from the source of Lightning's Trainer. jsonargparse checks the rest afterwards.
"""

from __future__ import annotations

import ast
import builtins
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lit_dps.cli.command_line import CONFIG_OPTIONS, CommandLine, Setting
from lit_dps.cli.config_file import SECTION_CLASSES, split_key
from lit_dps.cli.options import OPTIONS, option_of
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.parse_errors import TYPE_WORDS
from lit_dps.core.text import closest_key

CLASSES = {"class_path", "init_args", "dict_kwargs"}  # of sections that name a class
CLASS_SECTIONS = ("model", "data")
# Verbs whose options are all known here. The parser checks the options of Lightning's verbs.
CHECKED_VERBS = ("study", "advise", "masks")
WITHOUT_MODEL = ("analyze",)  # ignores all sections but study and storage
# What to write in place of an option that sets a key of a stored study, by key or section.
_OTHER_GOAL = "Write lit-dps figures NAME --goal VALUE, or lit-dps study FILE --study.goals VALUES."
HINTS_OF_STORED = {
    "goal": _OTHER_GOAL,
    "study.goals": _OTHER_GOAL,
    "study.statistic": "Write --statistic NAME.",
}
COMMON_OPTIONS = {"config", "help", "print_config"}
KEYS_OF_LIGHTNING = {"seed_everything"}
# What to write for a missing class, by section.
MISSING_CLASSES = {
    "model": "model: {class_path: mymodule.MyModel}, the path of your LightningModule",
    "data": "data: {class_path: mymodule.MyData}, the path of your LightningDataModule",
}

# Kinds of values, in the order of messages.
KINDS = (dict, list, str, int, float, bool, NoneType)
# Kind by the origin of a type. Any value fits a type that is missing here.
_KIND_OF: dict[Any, Any] = {
    **dict.fromkeys((list, tuple, set, Sequence, Iterable), list),
    **dict.fromkeys((dict, Mapping), dict),
    **{kind: kind for kind in (int, float, str, bool, NoneType)},
}


# ---- Known keys ----


def sections() -> dict[str, set[str]]:
    """Return the keys of each section; empty for sections that this module cannot read."""
    keys: dict[str, set[str]] = {section: set() for section in CLASS_SECTIONS}
    for section, by_name in types_by_key().items():
        keys[section] = set(by_name)
    return keys


def types_by_key() -> dict[str, dict[str, Any]]:
    """Return the type of each key, by section; empty for unreadable sections."""
    sections = {}
    for section, cls in SECTION_CLASSES.items():
        hints = get_type_hints(cls)
        sections[section] = {field.name: hints[field.name] for field in fields(cls)}
    lightning = find_spec("lightning")  # does not import it
    sections["trainer"] = {}
    if lightning is not None and lightning.origin is not None:
        file = Path(lightning.origin).parent / "pytorch" / "trainer" / "trainer.py"
        sections["trainer"] = _trainer_arguments(file)
    return sections


@cache
def _trainer_arguments(file: Path) -> dict[str, Any]:
    """Return the types of the Trainer's arguments by name, from its source.

    Returns:
        Empty if the class is missing, or if it has `**kwargs`.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    method = _constructor(tree)
    if method is None or method.args.kwarg is not None:
        return {}
    parameters = [*method.args.args[1:], *method.args.kwonlyargs]
    return {parameter.arg: _type_of(parameter.annotation) for parameter in parameters}


def _constructor(tree: ast.Module) -> ast.FunctionDef | None:
    """Return the `__init__` of the Trainer; None without one."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return method
    return None


class _Names(dict[str, Any]):
    """Names in annotations. Any value fits the type of an unknown name."""

    def __missing__(self, name: str) -> Any:
        return Any


def _type_of(annotation: ast.expr | None) -> Any:
    """Return the type of an annotation in a source, in which classes of Lightning are `Any`."""
    if annotation is None:
        return Any
    try:
        return eval(ast.unparse(annotation), {}, _Names(vars(builtins) | vars(typing)))
    except (AttributeError, TypeError):  # such as torch.device
        return Any


def check_command(command: CommandLine) -> None:
    """Check the names, kinds and completeness of the keys of a command.

    Raises:
        UserError: for an unknown key, an option in a file, a value of the wrong kind, a command
            that trains without a class of the model or the data, and an option of `analyze` that
            the storage answers.
    """
    check_options(command)
    if command.verb in WITHOUT_MODEL:
        check_is_stored(command)
        return
    check_kinds(command)
    if command.verb in CHECKED_VERBS:
        check_names(command)
    check_classes(command)


def options_of(verb: str) -> set[str]:
    """Return the options of a verb that are no keys of a file, without dashes at the beginning."""
    options = set(COMMON_OPTIONS)
    if verb in OPTIONS:
        for field in fields(OPTIONS[verb]):
            options.add(option_of(field.name).removeprefix("--"))
    return options


def check_options(command: CommandLine) -> None:
    """Raise UserError if a file sets an option of the command line."""
    options = options_of(command.verb)
    for key, value, source in command.settings:
        for name in (key, key.replace("_", "-")):
            if name in options and not source.is_option:
                raise UserError(
                    f"{key} is an option of the command line; a file cannot set it. Write "
                    f"--{name} after the file.",
                    key=key,
                    value=value,
                    hint=f"--{name}",
                )


def check_is_stored(command: CommandLine) -> None:
    """Raise ConfigError if an option sets a key that `analyze` reads from the storage."""
    reason = "analyze reads it from the storage"
    refuse_options(command, ("storage", "study.name"), reason, HINTS_OF_STORED)


def refuse_options(
    command: CommandLine,
    used: Collection[str],
    reason: str,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ConfigError if an option sets a key that a command does not use.

    The same key in a file is ignored, because the file may be the configuration of a study.

    Args:
        command: The command.
        used: The sections and the keys that it uses.
        reason: Why it does not use the others, for the message.
        hints: What to write instead, by key or section.
    """
    # `sections` would import torch.
    known = {*SECTION_CLASSES, *CLASS_SECTIONS, "trainer", *KEYS_OF_LIGHTNING}
    for key, value, source in command.settings:
        section = split_key(key)[0]
        is_option = source.is_option and source.name not in CONFIG_OPTIONS
        if is_option and section in known and not {section, key} & {*used}:
            hint = hints.get(key, hints.get(section))
            raise ConfigError(key, value, f"omitted, because {reason}", hint)


def check_names(command: CommandLine) -> None:
    """Raise UserError if a key of a command is in no section, and is no option of its verb."""
    known = sections()
    options = options_of(command.verb) | KEYS_OF_LIGHTNING
    for setting in command.settings:
        section, rest = split_key(setting.key.rstrip("+"))
        name, _ = split_key(rest)
        if section not in known and section not in options:
            _refuse_name(setting, section, {*known, *options})
        if name and name != "help" and known.get(section) and name not in known[section]:
            keys = {f"{section}.{each}" for each in known[section]}
            _refuse_name(setting, f"{section}.{name}", keys)


def _refuse_name(setting: Setting, key: str, known: set[str]) -> None:
    """Raise UserError for an unknown key, with the known key that is most similar."""
    dashes = ""
    if setting.source.is_option:
        dashes = "--"
    message = f"{dashes}{key}: {key.rpartition('.')[2]!r} is not accepted"
    near = closest_key(key, known)
    hint = None
    if near is not None:
        hint = f"did you mean {dashes}{near}?"
        message += f"; {hint}"
    raise UserError(message, key=key, value=setting.value, hint=hint)


def check_classes(command: CommandLine) -> None:
    """Raise UserError if a command that trains sets no class of the model or of the data."""
    keys = {setting.key for setting in command.settings}
    if command.is_retraining or keys & {"help", "print_config"}:
        return
    missing = []
    for section in CLASS_SECTIONS:
        if command.value(section) is None and command.value(f"{section}.class_path") is None:
            missing.append(section)
        if f"{section}.help" in keys:
            return
    if not missing:
        return
    if not command.files and len(missing) > 1:
        raise UserError(
            f"{command.verb} needs a configuration file with {' and '.join(missing)}. "
            "`lit-dps configs` lists the files of the package.",
            key="--config",
        )
    place = ""
    if command.source(missing[0]) is None and command.files:
        place = f" in {', '.join(command.files)}"
    example = MISSING_CLASSES[missing[0]]
    names = " and ".join(f"{section}.class_path" for section in missing)
    verb = "is" if len(missing) == 1 else "are"
    raise UserError(
        f"{names} {verb} missing{place}. Write {example}.",
        key=f"{missing[0]}.class_path",
        allowed=example,
    )


# ---- Kinds of values ----


def check_kinds(command: CommandLine) -> None:
    """Raise ConfigError if a value is not of the kind that its key takes."""
    known = types_by_key()
    for key, value, _ in command.settings:
        section, name = split_key(key)
        if section in CLASS_SECTIONS:
            _check_class_key(key, value)
        elif section in known and not name:
            _check_section(section, value, known[section])
        elif name in known.get(section, {}):
            _check_value(key, value, known[section][name])


def _check_class_key(key: str, value: Any) -> None:
    """Check a key of a section that names a class and its arguments."""
    section, name = split_key(key)
    if not name and not isinstance(value, (str, type(None))):
        raise ConfigError(section, value, "keys with values: class_path and init_args")
    if name == "class_path" and not isinstance(value, str):
        raise ConfigError(key, value, "the path of a class, such as mymodule.MyClass")
    if name == "init_args" and not isinstance(value, (Mapping, str, type(None))):
        raise ConfigError(key, value, "keys with values: the arguments of the class by name")


def _check_section(section: str, value: Any, known: Mapping[str, Any]) -> None:
    """Check a section that is no mapping: it may name a file."""
    if isinstance(value, str) and Path(value).suffix in (".yaml", ".yml"):
        return
    names = ", ".join(list(known)[:3])
    raise ConfigError(section, value, f"keys with values, such as {names}; or omitted")


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError if a value does not fit the type of its key."""
    if _fits(value, hint):
        return
    kinds = " or ".join(_words(_kinds(hint)))
    if key.startswith("storage."):
        value = "***"
    raise ConfigError(key, value, f"{kinds}{_words_of_items(hint)}")


def _words_of_items(hint: Any) -> str:
    """Return which values a list or a mapping may contain, in words; "" if that is unknown."""
    for each in _alternatives(hint):
        if _kinds(each) <= {list, dict}:
            words = [word.partition(",")[0] for word in _words(_kinds(_inner(each)) - {Any})]
            if words:
                return f"; each value is {' or '.join(words)}"
    return ""


def _words(kinds: set[Any]) -> list[str]:
    """Return the names of kinds in messages. A whole number is a number."""
    if float in kinds:
        kinds = kinds - {int}
    return [TYPE_WORDS[kind.__name__] for kind in sorted(kinds, key=KINDS.index)]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; the type itself if it is no union."""
    if get_origin(hint) in (Union, UnionType):
        return get_args(hint)
    return (hint,)


def _kinds(hint: Any) -> set[Any]:
    """Return the kinds of values that a type takes."""
    return {_KIND_OF.get(get_origin(each) or each, Any) for each in _alternatives(hint)}


def _fits(value: Any, hint: Any) -> bool:
    """Return False if a value certainly does not fit a type."""
    kinds = _kinds(hint)
    if Any in kinds:
        return True
    if isinstance(value, str) and kinds & {list, dict} and value.lstrip()[:1] in ("[", "{"):
        return True  # jsonargparse parses it
    if isinstance(value, list):
        return _items_fit(value, hint, list)
    if isinstance(value, Mapping):
        return _items_fit(list(value.values()), hint, dict)
    if value is None:
        return NoneType in kinds
    if isinstance(value, bool):
        return bool(kinds & {bool, str})
    if isinstance(value, (int, float)):
        return bool(kinds & {int, float, str, bool})
    return str in kinds or _is_other_scalar(str(value), kinds)


def _items_fit(items: list[Any], hint: Any, kind: type) -> bool:
    """Return True if the items fit one of the lists or mappings that a type allows."""
    for each in _alternatives(hint):
        if _kinds(each) == {kind} and all(_fits(item, _inner(each)) for item in items):
            return True
    return False


def _inner(hint: Any) -> Any:
    """Return the type of the items of a list or a mapping; Any if it is unknown."""
    arguments = [each for each in get_args(hint) if each is not Ellipsis]
    return arguments[-1] if arguments else Any


def _is_other_scalar(text: str, kinds: set[Any]) -> bool:
    """Return True if a text may be read as a number, a boolean or null.

    YAML reads 1e-3 as a text.
    """
    if kinds & {int, float}:
        try:
            float(text)
            return True
        except ValueError:
            pass
    if bool in kinds and text.lower() in ("true", "false", "yes", "no"):
        return True
    return NoneType in kinds and text == "null"
