"""The help of verbs that train, from dataclasses and docstrings, without an import of PyTorch.

`--help` shows the first sentence about each key of this package. `--help-all` also lists the
arguments of Lightning's Trainer, which LightningCLI would list first.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from lit_dps.cli.config_file import SECTION_CLASSES
from lit_dps.cli.options import OPTIONS, docs_of, metavar_of, option_of
from lit_dps.cli.verbs import docstring
from lit_dps.core.trial_config import STUDY_DEFAULTS

WIDTH = 80
INDENT = 29  # column of the sentences
MAX_DEFAULT = 15  # characters
# Verbs with this help. jsonargparse writes the help of the others.
HELPED = ("study", "advise", "masks", "fit", "validate", "test")
# They train or evaluate one trial, so they ignore what is searched.
SINGLE_TRIAL = ("fit", "validate", "test")
# What jsonargparse and Lightning add to each verb.
COMMON = {
    "--config FILE": "The configuration; of several, later ones win.",
    "--print_config": "Print the whole configuration, with defaults.",
    "--help-all": "Every key, also those of Lightning's Trainer.",
    "--model.help CLASS": "The arguments of a class; also --data.help.",
}
CHECKPOINT = {"--ckpt_path FILE": "A checkpoint of `fit`."}
FOREIGN_SECTIONS = (
    "model, data: your LightningModule and LightningDataModule: class_path, init_args",
    "trainer: arguments of Lightning's Trainer: accelerator, devices, ...",
)


def text(verb: str) -> str:
    """Return the help of a verb."""
    lines = [f"usage: lit-dps {verb} FILE [--KEY VALUE ...]", ""]
    description = docstring(verb).removeprefix(f"{verb}: ")
    lines += [*(description[0].upper() + description[1:]).splitlines(), ""]
    if verb in OPTIONS:
        cls = OPTIONS[verb]
        for field in fields(cls):
            lines += _entry(_option(field), _first_sentence(docs_of(cls)[field.name]))
    if verb in ("study", "advise", "masks"):
        lines += _entry("--engine NAME", "Short for --study.engine.")
    if verb in SINGLE_TRIAL:
        lines += _entries(CHECKPOINT)
    lines += _entries(COMMON)
    lines += ["", "Keys of FILE are options too: --goal.error 0.1 --study.space.model.lr.high 0.3"]
    lines += FOREIGN_SECTIONS
    for section, cls in SECTION_CLASSES.items():
        if section == "study" and verb in SINGLE_TRIAL:
            lines.append("study: ignored, except study.workload, the MLflow experiment")
        else:
            changed = {} if verb in SINGLE_TRIAL else STUDY_DEFAULTS
            lines += _section_lines(section, cls, changed)
    return "\n".join(lines)


def _section_lines(section: str, cls: type, changed: Mapping[str, Any]) -> list[str]:
    """Return a heading, and an entry for each key of a section.

    Args:
        section: The section.
        cls: Its dataclass.
        changed: Defaults of the verb, by key, that differ from those of the dataclass.
    """
    lines = [f"{section}: {_first_sentence(cls.__doc__ or '').rstrip('.')}"]
    for field in fields(cls):
        sentence = _first_sentence(docs_of(cls)[field.name])
        default = _default(field, changed.get(f"{section}.{field.name}", MISSING))
        if default is not None:
            sentence = f"{sentence.removesuffix('.')} ({default})."
        lines += _entry(f"--{section}.{field.name}", sentence)
    return lines


def _option(field: Field[Any]) -> str:
    """Return the option of a field, with a name for its value."""
    option = option_of(field.name)
    if field.type == "bool":
        return option
    return f"{option} {metavar_of(field)}"


def _default(field: Field[Any], changed: Any) -> str | None:
    """Return the default of a key as it is written in a file; None if there is none to show.

    Args:
        field: The field of the key.
        changed: The default of the verb, if it is another one; else MISSING.
    """
    value = field.default if changed is MISSING else changed
    if changed is MISSING and field.default_factory is not MISSING:
        value = field.default_factory()
    if value is MISSING or value in (None, "", [], {}, ()):
        return None
    if isinstance(value, str):
        return value
    written = json.dumps(value)
    if len(written) > MAX_DEFAULT and isinstance(value, list):
        return f"[{', '.join(map(json.dumps, value[:3]))}, ...]"
    return written


def _first_sentence(description: str) -> str:
    """Return the first sentence of a description."""
    return " ".join(description.split()).split(". ")[0].removesuffix(".") + "."


def _entries(options: dict[str, str]) -> list[str]:
    lines = []
    for option, sentence in options.items():
        lines += _entry(option, sentence)
    return lines


def _entry(option: str, sentence: str) -> list[str]:
    """Return the lines of an option: its name, and beside it what it does."""
    lines = textwrap.wrap(sentence, WIDTH - INDENT)
    head = f"  {option:{INDENT - 3}} "
    if len(head) > INDENT:
        return [head.rstrip(), *(" " * INDENT + line for line in lines)]
    return [head + lines[0], *(" " * INDENT + line for line in lines[1:])]
