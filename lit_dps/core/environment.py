"""Environments: the code, data, versions, threads and machine of a study's trials, as plain data.

An environment is a dict of texts by name (python, version.torch, hardware, ...) with the entries
below. The header of a study stores each environment once. A trial refers to it by its key.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Entries of an environment. Environments of earlier versions have none of these.
KEY = "key"
SINCE = "since"  # time of the first run in this environment: 2026-11-27 14:05
THREADS = "threads"  # of each worker
SOURCES = "sources"  # file of the user's code -> hashes of its bytes and of its syntax tree
FILE = "file "  # begins the name of a file that the model's arguments name
# Begins the hash of a class, function or value of a script: the version of the described text.
OBJECT_TEXT = "text 4"
# Byte code is of one version of Python: "text 4 of Python 3.11: ".
_OBJECT_HASH = re.compile(r"(text \d+)(?: of (Python [\d.]+))?: ")
# Values of the data's axes and choices -> three hashes: of whole numbers and texts, of floats, and
# of the processor and the versions that decide how floats are rounded.
DATA = "data"
# Results of the first steps of a script's model -> four texts: the value for people, its exact text
# or hash, the trial, and the processor and the versions that decide how floats are rounded.
COMPUTED = "computed"
INEXACT = "inexact: "  # begins the last text where two equal runs may differ, as on a GPU
UNKNOWN = ["unknown"]  # in place of hashes
HALF = "half precision"  # is in the last text if a trial computes with less than 24 bits
# Largest relative difference of the first steps between processors and versions. Rounding changes
# sums of float32 by about 1e-6, and products in TF32 by at most 2^-11.
ROUNDING = 1e-3
ROUNDING_OF_HALF = 1e-2
CONSTANT = "the constant "  # begins the name of a constant among changes

Hashes = Sequence[str]


def with_key(environment: Mapping[str, Any], since: str) -> dict[str, Any]:
    """Return an environment with its key, a hash of its content, and the time of its first use."""
    content = json.dumps(environment, sort_keys=True)
    return {KEY: hashlib.sha256(content.encode()).hexdigest()[:10], SINCE: since, **environment}


@dataclass(frozen=True)
class Environment:
    """The environment of a run; can be pickled.

    Attributes:
        content: The environment with its key, as it is stored; empty if it is not recorded.
    """

    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """The key by which trials refer to the environment; None if it is not recorded."""
        return self.content.get(KEY)

    @property
    def sources(self) -> dict[str, Hashes]:
        """Hashes of the user's code, by file."""
        return dict(self.content.get(SOURCES, {}))

    @property
    def data(self) -> dict[str, Hashes]:
        """Hashes of the data, by the values of its axes; empty if they were not computed."""
        return dict(self.content.get(DATA, {}))

    @property
    def code_key(self) -> str | None:
        """A key of what changes step times; None if the environment is not recorded.

        The content of the data, the results of the first steps, comments, and files that the
        model's arguments name do not change the time of a step.
        """
        if not self.content:
            return None
        content = {}
        for name, value in self.content.items():
            if name not in (KEY, SINCE, DATA, COMPUTED):
                content[name] = value
        # The second hash of a file is of its syntax tree. Compiled code has only the first one.
        # Earlier versions stored a third one.
        content[SOURCES] = {}
        for file, hashes in self.sources.items():
            if not file.startswith(FILE):
                content[SOURCES][file] = hashes[:2][-1]
        return with_key(content, since="")[KEY]


def is_same_source(one: Hashes, other: Hashes) -> bool:
    """Return True if two versions of a file have equal bytes or equal syntax trees, or if one is
    unknown.

    Comments and formatting do not change a syntax tree. A new version of Python may change the
    tree, but not the bytes. Objects of a script cannot be compared between versions of their text.
    """
    if UNKNOWN in (list(one), list(other)) or not is_comparable(one, other):
        return True
    return bool({*one[:2]} & {*other[:2]})


def text_version(hashes: Hashes) -> tuple[str, str]:
    """Return how an object is described, and the version of Python if byte code is part of it.

    Both are empty for a file, for data and for earlier versions.
    """
    match = _OBJECT_HASH.match(hashes[0])
    if match is None:
        return "", ""
    return match[1], match[2] or ""


def is_comparable(one: Hashes, other: Hashes) -> bool:
    """Return False if another version of lit_dps or Python described one of two objects.

    Source and byte code are compared and differ: the source was edited while a command ran.
    """
    text, python = text_version(one)
    other_text, other_python = text_version(other)
    if text != other_text:
        return False
    return not python or not other_python or python == other_python


def is_same_data(one: Hashes, other: Hashes) -> bool:
    """Return True if the hashes of two data sets agree, as far as they can be compared.

    Floats are compared only if processor and versions of torch and NumPy are equal. Otherwise they
    may be rounded differently.
    """
    if UNKNOWN in (list(one), list(other)):
        return True
    if one[0] != other[0]:
        return False
    has_floats = len(one) == 3 and len(other) == 3
    if not has_floats or one[2] != other[2]:
        return True
    return one[1] == other[1]


def is_same_computed(one: Hashes, other: Hashes) -> bool:
    """Return True if two results of the first steps agree, as far as they can be compared.

    With another processor or other versions, and always on GPUs, numbers may differ by `ROUNDING`,
    and only the options that both versions have are compared. Results of different trials cannot be
    compared.
    """
    if UNKNOWN in (list(one), list(other)) or one[2] != other[2] or one[1] == other[1]:
        return True
    if one[3] == other[3] and not one[3].startswith(INEXACT):
        return False
    try:
        value, other_value = float(one[0]), float(other[0])
    except ValueError:
        return _has_equal_options(one[1], other[1])
    if math.isnan(value) or math.isnan(other_value):
        return math.isnan(value) and math.isnan(other_value)
    rounding = ROUNDING_OF_HALF if HALF in one[3] else ROUNDING
    return math.isclose(value, other_value, rel_tol=rounding)


def _has_equal_options(one: str, other: str) -> bool:
    """Return True if the options that two JSON objects share are equal; False for other texts."""
    try:
        options, others = json.loads(one), json.loads(other)
    except ValueError:
        return False
    shared = options.keys() & others.keys()
    return bool(shared) and all(options[key] == others[key] for key in shared)


SAME: dict[str, Callable[[Hashes, Hashes], bool]] = {
    SOURCES: is_same_source,
    DATA: is_same_data,
    COMPUTED: is_same_computed,
}


def changed_parts(
    stored: Sequence[Mapping[str, Any]], now: Mapping[str, Any], entry: str
) -> list[str]:
    """Return the names in an entry whose version differs from all stored environments.

    A name that occurs in no stored environment is new and does not count as a change. A file that
    trials write (`files_written_by_trials`) does not count either.

    Args:
        stored: Environments of a study.
        now: The environment to compare.
        entry: SOURCES, DATA or COMPUTED.
    """
    changed = []
    written = files_written_by_trials(stored)
    for name, version in now.get(entry, {}).items():
        if entry == SOURCES and name in written:
            continue
        earlier = [each[entry][name] for each in stored if name in each.get(entry, {})]
        earlier = _best_comparable(entry, version, earlier)
        if earlier and not any(SAME[entry](version, other) for other in earlier):
            changed.append(name)
    return changed


def files_written_by_trials(environments: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the files of the model's arguments that are `UNKNOWN` in any environment.

    Trials write these files. A run that is killed stores the hash of its start, which the next run
    does not find again.
    """
    names = set()
    for environment in environments:
        for name, hashes in environment.get(SOURCES, {}).items():
            if name.startswith(FILE) and list(hashes) == UNKNOWN:
                names.add(name)
    return names


def _best_comparable(entry: str, version: Hashes, others: Sequence[Hashes]) -> list[Hashes]:
    """Return the versions of a part that a version is compared with.

    A version that cannot be compared, or only roughly, must not hide a change since one that can.
    """
    comparable = []
    for other in others:
        is_known = list(other) != UNKNOWN and is_comparable(other, version)
        if is_known and not (entry == COMPUTED and other[2:3] != version[2:3]):
            comparable.append(other)
    if entry == SOURCES:
        return comparable
    # The last text is of the processor and the versions.
    exact = [other for other in comparable if other[-1] == version[-1]]
    return exact or comparable


def changes_since(stored: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> list[str]:
    """Return the files, data and first steps that differ from all stored environments.

    Returns:
        Words such as "my_code.py", "the constant __main__.WIDTH", "the data at noise=0.5" and "the
        first steps of your model (training loss 2.31, was 2.3)".
    """
    words = []
    for name in changed_parts(stored, now, SOURCES):
        text, python = text_version(now[SOURCES][name])
        is_constant = bool(text) and not python  # the text of code is of one version of Python
        words.append(CONSTANT + name if is_constant else name)
    for axes in changed_parts(stored, now, DATA):
        text = "the data"
        if axes:
            text += f" at {axes}"
        words.append(text)
    steps = []
    for name in changed_parts(stored, now, COMPUTED):
        value = now[COMPUTED][name][0]
        versions = [each[COMPUTED][name] for each in stored if name in each.get(COMPUTED, {})]
        before = versions[-1][0]
        steps.append(f"other {name}" if value == before else f"{name} {value}, was {before}")
    if steps:
        words.append(f"the first steps of your model ({'; '.join(steps)})")
    return words


def remedy_of_constants(changes: Sequence[str]) -> str:
    """Return what to do about constants among changes (`changes_since`); "" without them."""
    if not any(each.startswith(CONSTANT) for each in changes):
        return ""
    return (
        " A value that differs in each run, such as a time stamp, belongs in an argument or a "
        "container that the code does not use in training."
    )


def described_otherwise(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of objects whose stored and present descriptions cannot be compared."""
    sources = stored.get(SOURCES, {})
    names = []
    for name, hashes in now.get(SOURCES, {}).items():
        if name in sources and not is_comparable(sources[name], hashes):
            names.append(name)
    return names


def lacks_parts(stored: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if an environment has no code or first steps to compare with the present ones."""
    for entry in (SOURCES, COMPUTED):
        known = [name for name, version in now.get(entry, {}).items() if version != UNKNOWN]
        if not stored.get(entry, {}).keys() >= {*known}:
            return True
    return bool(described_otherwise(stored, now))


def versions_of(
    environments: Sequence[Mapping[str, Any]], entry: str, name: str
) -> list[list[Mapping[str, Any]]]:
    """Return the environments with this name in an entry, grouped by its version, oldest first."""
    groups: list[list[Mapping[str, Any]]] = []
    for environment in environments:
        version = environment.get(entry, {}).get(name)
        if version is None or list(version) == UNKNOWN:
            continue
        for group in groups:
            others = [other[entry][name] for other in group]
            others = _best_comparable(entry, version, others)
            if not others or any(SAME[entry](version, each) for each in others):
                group.append(environment)
                break
        else:
            groups.append([environment])
    return groups
