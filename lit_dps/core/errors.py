"""Errors that are the user's to mend. The commands print them as one line and exit with 2."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lit_dps


class UserError(Exception):
    """Base class of errors that the user can fix: by other input, other files or other storage.

    Attributes:
        key: The configuration key, option or file that the error is about; None if there is none.
        value: The value of the key.
        allowed: What the value must be, as text; None if the message says it.
        hint: What the user can do next, as text; None if there is no advice.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        value: Any = None,
        allowed: str | None = None,
        hint: str | None = None,
    ):
        super().__init__(message)
        self.key = key
        self.value = value
        self.allowed = allowed
        self.hint = hint

    def __reduce__(self) -> tuple:
        # Workers send errors to their parent. The default would call the constructor with the
        # message alone, but subclasses have constructors with other arguments.
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[UserError], args: tuple, attributes: dict[str, Any]) -> UserError:
    """Return an unpickled error, without a call of its constructor."""
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class ConfigError(UserError, ValueError):
    """A configuration value that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str, hint: str | None = None):
        message = f"{key}: {shortened(repr(value))} is not allowed; {allowed}"
        if hint is not None:
            message += f"; {hint}"
        super().__init__(message, key=key, value=value, allowed=allowed, hint=hint)


class DataError(UserError):
    """A data set that is missing, unreadable or truncated."""


class StorageError(UserError):
    """A study or tracking database, or a file of an analysis, that cannot be opened, read or
    written."""


class Unguarded(UserError):
    """A user's script calls a command without a guard, so that every process that the command
    starts runs it again."""

    EXIT_CODE = 64  # of those processes
    OURS = "lit-dps "  # what their names begin with

    def __init__(self):
        super().__init__(
            "a script that calls lit_dps.run or lit_dps.cli.main is run again by each process "
            "that this starts: "
            "call it below if __name__ == '__main__':"
        )


LONGEST_VALUE = 200  # characters of a value in a message


def shortened(text: str) -> str:
    """Return a text of at most `LONGEST_VALUE` characters, with dots in place of the middle."""
    if len(text) <= LONGEST_VALUE:
        return text
    half = (LONGEST_VALUE - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut(text: str) -> str:
    """Return the first part and the end of a long message of another library."""
    if len(text) <= 3 * LONGEST_VALUE:
        return text
    return f"{text[: 2 * LONGEST_VALUE]} ... {text[-LONGEST_VALUE:]}"


# Control characters, marks of writing direction, halves of characters, and separators of lines.
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


def escaped(text: str) -> str:
    r"""Return a text with control characters replaced by escapes such as \x1b.

    A terminal would obey control characters. Line breaks and tabs are kept.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(value: Any) -> Any:
    """Return plain JSON in which all strings and keys are `escaped`.

    The strings may come from a stranger's database.
    """
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {escaped(key): printable(each) for key, each in value.items()}
    if isinstance(value, list):
        if set(map(type, value)) <= {int, float}:
            return value
        return [printable(each) for each in value]
    return value


def meant(name: str, known: Iterable[str]) -> str | None:
    """What a mistyped name was likely meant to be; None if it is near to none."""
    return next(iter(get_close_matches(name, sorted(known), 1, 0.7)), None)


def user_error_in(error: BaseException | None) -> UserError | None:
    """The UserError that another error was raised from, if any: it says best what is wrong."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error


_FRAME = re.compile(r' *File "(.+)", line (\d+), in (.+)')


def is_of_loader_worker(error: BaseException) -> bool:
    """Return True if a worker of a DataLoader raised the error. Its text then contains the
    traceback."""
    return "in DataLoader worker process" in str(error) and "Original Traceback" in str(error)


def text_of(error: BaseException) -> str:
    """Return the text of an error; of an error in a worker of a DataLoader, the original text."""
    text = str(error)
    if not is_of_loader_worker(error):
        return text
    lines = text.strip().splitlines()
    last_frame = max(
        i for i, line in enumerate(lines) if line.startswith((" ", "Original Traceback"))
    )
    return " ".join(lines[last_frame + 1 :]).removeprefix(f"{type(error).__name__}: ")


def place_in_user_code(error: BaseException) -> str:
    """Return the last place of an error in the user's code, as " (file, line, in function)".

    Returns:
        "" if no frame is in the user's code.
    """
    origins = [find_spec(name).origin for name in ("lightning", "torch")]
    libraries = [f"{Path(origin).parent}{os.sep}" for origin in (*origins, lit_dps.__file__)]
    frames = list(traceback.extract_tb(error.__traceback__))
    if is_of_loader_worker(error):
        matches = filter(None, map(_FRAME.match, str(error).splitlines()))
        frames += [traceback.FrameSummary(match[1], int(match[2]), match[3]) for match in matches]
    frames = [frame for frame in frames if not frame.filename.startswith(tuple(libraries))]
    if not frames:
        return ""
    # The user's call of another library says more than a line within that library.
    stdlib, installed = sysconfig.get_path("stdlib"), f"{os.sep}site-packages{os.sep}"
    of_the_user = []
    for frame in frames:
        if installed not in frame.filename and not frame.filename.startswith(stdlib):
            of_the_user.append(frame)
    last = (of_the_user or frames)[-1]
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name})"


_NOT_MEANT = "Expected a <class 'NoneType'>", "Expected <class 'NoneType'>", "Expected a path"
_KEY = re.compile(r'Parser key "([^"]+)": ')
_WRAPPED = re.compile(
    r"Problem with given class_path '[^']*': (?=Problem|Option|Expected|.*required)"
)
_UNION = re.compile(
    r".*?Does not validate against any of the Union subtypes Subtypes: \[.*?\] Errors: (- .*)"
)
_PLAIN = re.compile(r"(?:- )?Expected (?:a )?<class '(\w+)'>")
_GIVEN = re.compile(r" Given value: ?(.*?)(?= - (?:Expected|Problem)|$)")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*)\]")
_NO_YAML = re.compile(
    r"class_path='(?P<cls>[^']+)', init_args=Namespace\((?:[^()]|\([^()]*\))*?"
    r"(?P<key>\w+)=<(?P<default>[\w.]+): (?P<value>[^>]+)>"
)
# Of the key, and of the option `--engine`
_SPARSE_ENGINE = re.compile(r"(study\.engine|argument --engine): .*?'sparse'")
_BELOW = re.compile(r".*Got value: NestedArg\(key='([^']+)', .*")


def _of_the_other_lightning(text: str) -> str | None:
    """What is wrong with a class that is no subclass of Lightning's own because it is one of
    pytorch_lightning's."""
    match = re.search(r"Import path (\S+) does not correspond to a subclass of (\w+)", text)
    if match is None:
        return None
    module, _, name = match[1].rpartition(".")
    bases = getattr(getattr(sys.modules.get(module), name, None), "__mro__", ())
    if not any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in bases):
        return None
    return (
        f"{match[1]} is a {match[2]} of pytorch_lightning, not of lightning.pytorch: import "
        "that "
        "in its place"
    )


def one_line(error: BaseException | str) -> str:
    """The key and the reason: of a class that may also be left out, only why the class does not
    serve."""
    text = " ".join(str(error).split())
    if other := _of_the_other_lightning(text):
        return other
    if "cannot represent an object" in text and (match := _NO_YAML.search(text)):
        remedy = f"set {match['key']}: {match['value']}"
        return (
            f"{match['cls']}: the default of {match['key']}, {match['default']}, has no form "
            "in "
            f"YAML; {remedy}"
        )
    keys = _KEY.findall(text)
    while match := _UNION.fullmatch(_KEY.sub("", text)):
        reasons = [reason.removeprefix("- ") for reason in re.split(r" (?=- )", match[1])]
        ours = [r for r in reasons if not r.startswith(_NOT_MEANT)]
        ours = [reason.split(" Given value type:")[0] for reason in ours or reasons]
        text = ours[-1]
        if _PLAIN.fullmatch(text) and (given := _GIVEN.search(match[0])):
            kinds = dict.fromkeys(kind[1] for reason in reasons if (kind := _PLAIN.match(reason)))
            names = " or ".join(kinds).replace("NoneType", "null")
            text = f"Expected a <class '{names}'>. Got value: {given[1]}"
        if all(map(_LITERAL.fullmatch, ours)) and (
            given := _GIVEN.search(match[0])
        ):  # as the trainer's precision has it
            values = [
                value for reason in ours for value in _LITERAL.fullmatch(reason)[1].split(", ")
            ]
            known: dict[str, str] = {}  # 64 and '64' are one
            for value in values:
                known.setdefault(value.strip("'"), value)
            text = f"Expected a typing.Literal[{', '.join(known.values())}]. Got value: {given[1]}"
    text = _WRAPPED.sub("", _KEY.sub("", text))
    if match := _BELOW.fullmatch(text):
        key = ".".join(keys)
        return f"{key}.{match[1]}: there is no such key; {key} has none below it"
    text = re.sub(
        r"Expected a <class '([\w ]+)'>\. Got value: (.*)",
        r"'\2' is not allowed; \1 expected",
        text,
    )
    text = re.sub(
        r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)",
        r"'\2' is not allowed; one of \1",
        text,
    )
    line = f"{'.'.join(keys)}: {text}" if keys else text
    if _SPARSE_ENGINE.match(line):
        return "study.engine: 'sparse' is not allowed; this engine was removed. Use 'auto'"
    return line
