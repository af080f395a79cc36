"""Writes docs/keys.md and docs/python.md from the docstrings of the package: `python
docs/reference.py`.

A test writes them anew and compares, so that a key or a name that is added, or a default that is
changed, is told.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from docstring_parser import Docstring, parse

import lit_dps
import lit_dps.cli as cli
import lit_dps.data as data
import lit_dps.models as models
import lit_dps.module as module
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.config_file import SECTION_CLASSES
from lit_dps.cli.parser import CommandParser
from lit_dps.cli.verbs import summary
from lit_dps.core.exit_codes import ExitCode
from lit_dps.pruning import PRUNERS

DOCS = Path(__file__).parent
MADE = "<!-- made by docs/reference.py from docstrings: change these, then run it -->\n"
CHANGED = {  # by the commands
    "study.name": "of the file: `mine` of `mine.yaml`",
    "goal.early_reject": "`true` in a study, else `false`",
}
OTHERS = {
    "model",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "seed_everything",
    "config",
    "help",
    "print_config",
}
SKIPPED = (SUPPRESS, "Path to a configuration file.", "Only read over")  # whole sections

KEYS = """\
# Every key

{made}
One file configures every command. `lit-dps VERB --help` explains these keys too, and `--print_config` shows them with
their values. On the command line each is an option: `--study.trials 8`. `trainer` takes the arguments of Lightning's
`Trainer`, `seed_everything` a number, for `fit`.
`model` and `data` take `class_path` and `init_args` of your own classes, or of those [below](#model-and-data).
[Your own model and data](own-code.md) and [running studies](studies.md) say how keys are used together.
"""

PYTHON = """\
# Python

{made}
What `lit_dps` exports; all else may move. [A notebook](notebook.ipynb) uses it, and [extending](extending.md) has the
interfaces of plug-ins. Modules are imported when a name is first asked for: `lit_dps.load` needs no torch.
"""


def keys_page() -> str:
    """The page of all keys of the configuration, of the classes that it names, and of the options
    of the verbs."""
    parts = [KEYS.format(made=MADE)]
    for section, cls in SECTION_CLASSES.items():
        parts.append(f"## {section}\n\n{_first(cls)}\n\n{_table(cls, section)}")
    parts.append(
        "## Model and data\n\nThe classes of the package; each other module, data module and "
        "network is as welcome."
    )
    named = {
        f"lit_dps.module.{cls.__name__}": cls
        for cls in (module.ImageClassifier, module.LanguageModel)
    }
    for room in (models, data):
        named |= {f"{room.__name__}.{name}": getattr(room, name) for name in room.__all__}
    made: dict[Any, str] = {}
    for path, cls in sorted(
        named.items(), key=lambda item: len(item[1].__mro__)
    ):  # what is derived from comes first
        if cls.__init__ in made:
            table = f"Its keys are those of `{made[cls.__init__]}`."
        else:
            table, made[cls.__init__] = _table(cls), path
        named[path] = f"### {path}\n\n{_first(cls)}\n\n{table}"
    parts += named.values()
    parts.append(
        "## Pruning methods\n\nValues of `pruning.method`; their keys stand below "
        "`pruning.options`."
    )
    for name, cls in PRUNERS.items():
        table = "" if cls.__init__ is object.__init__ else f"\n\n{_table(cls)}"
        parts.append(f"### {name}\n\n{_first(cls)}{table}")
    parts.append(
        "## Verbs\n\nThe options of each verb beside `--config`, `--help`, `--print_config` and "
        "the keys above."
    )
    for verb in cli.VERBS:
        text = summary(verb)
        rows = [(f"`{option}`", meaning) for option, meaning in _options(verb)]
        table = _rows(("option", "meaning"), rows) if rows else "It has none of its own."
        parts.append(f"### lit-dps {verb}\n\n{text[0].upper()}{text[1:]}\n\n{table}")
    codes = [(f"{code.value}", code.meaning) for code in ExitCode]
    parts.append(
        "## Exit codes\n\n`lit_dps.core.exit_codes.ExitCode` names them.\n\n"
        + _rows(("exit code", "meaning"), codes)
    )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def python_page() -> str:
    """The page of all names of `lit_dps`."""
    parts = [PYTHON.format(made=MADE)]
    for name, path in lit_dps._PUBLIC.items():
        found = getattr(import_module(path), name)
        parts.append(f"## {name}\n\n{_signature(name, found)}\n\n{_prose(found)}{_members(found)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _first(cls: type) -> str:
    """Return the first paragraph of a docstring, as Markdown."""
    return _text(_paragraphs(parse(inspect.getdoc(cls) or ""))[0])


def _paragraphs(doc: Docstring) -> list[str]:
    """Return the paragraphs of a docstring. A first sentence may take several lines."""
    text = doc.short_description or ""
    if doc.long_description:
        text += ("\n\n" if doc.blank_after_short_description else "\n") + doc.long_description
    return text.split("\n\n")


def _described(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of those that it is derived from say of each argument."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("lit_dps"):
            for parameter in parse(base.__dict__.get("__doc__") or "").params:
                for name in parameter.arg_name.split(", "):
                    found[name] = parameter.description or ""
    return found


def _table(cls: type, section: str = "") -> str:
    described, hints, rows = (
        _described(cls),
        get_type_hints(cls.__init__, vars(sys.modules[cls.__module__])),
        [],
    )
    factories = {f.name: f.default_factory for f in fields(cls)} if is_dataclass(cls) else {}
    for name, parameter in _parameters(cls):
        if not described.get(name):
            raise LookupError(f"{cls.__module__}.{cls.__name__} does not say what {name} is")
        key = f"{section}.{name}" if section else name
        given = CHANGED.get(key, parameter.default)
        if callable(factories.get(name)):  # else it is MISSING
            given = factories[name]()
        default = given if isinstance(given, str) and "`" in given else _default(given)
        rows.append((f"`{key}`", _kind(hints[name]), default, _text(described[name])))
    return _rows(("key", "type", "default", "meaning"), rows) if rows else "It takes no arguments."


def _parameters(cls: type) -> Iterator[tuple[str, inspect.Parameter]]:
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name != "self" and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            yield name, parameter


def _kind(hint: Any) -> str:
    """A type as the reader of a configuration knows it."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " or ".join(map(_kind, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if hint is type(None):
        return "`null`"
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return f"`{re.sub(r'(typing|collections.abc|torch.nn.modules.module)[.]', '', text)}`"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "needed"
    if isinstance(value, (list, tuple)) and len(value) > 6:
        first, last = json.dumps(value[:3])[:-1], json.dumps(value[-1])
        return f"`{first}, ..., {last}]`"
    return f"`{json.dumps(value)}`"


def _text(description: str) -> str:
    """A part of a docstring as one paragraph of Markdown: stars of K* are no emphasis, bars no
    cells."""
    parts = re.split(r"(`[^`]*`)", " ".join(description.replace("``", "`").split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
    )


def _rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    lines = [list(heads), ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _prose(found: Any) -> str:
    """A docstring as Markdown: its text, then its arguments, attributes and errors as lists."""
    doc = parse(inspect.getdoc(found) or "")
    parts = []
    for paragraph in _paragraphs(doc):
        parts.append("\n".join(_text(line) for line in re.split(r"\n(?=- )", paragraph)))
    for title, metas in (("Arguments", "param"), ("Attributes", "attribute"), ("Raises", "raises")):
        rows = [meta for meta in doc.meta if meta.args and meta.args[0] == metas]
        if rows:
            lines = [f"- `{_named(meta)}`: {_text(meta.description or '')}" for meta in rows]
            parts.append(f"**{title}**\n\n" + "\n".join(lines))
    if doc.returns:
        parts.append(f"**Returns**: {_text(doc.returns.description or '')}")
    return "\n\n".join(parts)


def _named(meta: Any) -> str:
    return getattr(meta, "arg_name", None) or getattr(meta, "type_name", None) or "UserError"


def _signature(name: str, found: Any) -> str:
    text = re.sub(
        r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(found))
    )  # annotations that are kept as text
    kind = "class " if inspect.isclass(found) else ""
    return f"```python\n{kind}lit_dps.{name}{text.removesuffix(' -> None')}\n```"


def _members(found: Any) -> str:
    """The public methods and properties that a class of the package adds, with their first
    sentences."""
    if not inspect.isclass(found):
        return ""
    lines = []
    for name, member in vars(found).items():
        member = (
            member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        )
        if name.startswith("_") or not inspect.isfunction(member) or not member.__doc__:
            continue
        lines.append(f"- `{name}`: {_first(member)}")
    return "\n\n**Members**\n\n" + "\n".join(lines) if lines else ""


class _Found(Exception):
    """Carries the parser of a verb out of it, before it parses anything."""


def _options(verb: str) -> Iterator[tuple[str, str]]:
    """The options of a verb that are no keys of the configuration, and what its parser says of
    them."""
    if verb == "fit":  # with --of STUDY it is another module
        yield from _options("retrain")

    def stop(parser: Any, *args: Any, **kwargs: Any) -> None:
        raise _Found(parser)

    try:
        with patch.object(CommandParser, "parse_args", stop):
            import_module(f"lit_dps.cli.{verb}").main(CommandLine([verb]))
    except _Found as found:
        parser = found.args[0]
    for action in parser._actions:
        if hasattr(action, "_name_parser_map") and verb in (
            action._name_parser_map or {}
        ):  # of fit, validate and test
            parser = action._name_parser_map[verb]
    keys = OTHERS
    if verb == "init":  # its options --model and --data name classes
        keys = OTHERS - {"model", "data"}
    for action in parser._actions:
        name, said = (
            ", ".join(action.option_strings) or action.metavar or action.dest,
            str(action.help),
        )
        if (
            said.startswith(SKIPPED)
            or "." in action.dest
            or action.dest in keys
            or name.startswith("{")
        ):
            continue
        if verb in ("fit", "validate", "test"):  # Lightning's own, at length
            said = said.partition(". ")[0].partition(" - ")[0].rstrip(".") + "."
        yield name, _text(said)


PAGES = {"keys.md": keys_page, "python.md": python_page}


if __name__ == "__main__":
    for file, page in PAGES.items():
        (DOCS / file).write_text(page(), encoding="utf-8")
        print(f"written: docs/{file}")
