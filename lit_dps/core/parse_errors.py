"""Translates jsonargparse's errors into one line: the key and the reason."""

from __future__ import annotations

import re
import sys

# Reasons of types that a value was not meant to have: null, for an optional class, or a path.
_NOT_MEANT = "Expected a <class 'NoneType'>", "Expected <class 'NoneType'>", "Expected a path"
_KEY = re.compile(r'Parser key "([^"]+)": ')
_WRAPPED = re.compile(
    r"Problem with given class_path '[^']*': (?=Problem|Option|Expected|.*required)"
)
_UNION = re.compile(
    r".*?Does not validate against any of the Union subtypes Subtypes: \[.*?\] Errors: (- .*)"
)
_BUILTIN_TYPE = re.compile(r"(?:- )?Expected (?:a )?<class '(\w+)'>")
_GIVEN_VALUE = re.compile(r" Given value: ?(.*?)(?= - (?:Expected|Problem)|$)")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*)\]")
_NO_YAML = re.compile(
    r"class_path='(?P<cls>[^']+)', init_args=Namespace\((?:[^()]|\([^()]*\))*?"
    r"(?P<key>\w+)=<(?P<default>[\w.]+): (?P<value>[^>]+)>"
)
# Of the key, and of the option `--engine`.
_SPARSE_ENGINE = re.compile(r"(study\.engine|argument --engine): .*\bsparse\b")
_NESTED_KEY = re.compile(r".*Got value: NestedArg\(key='([^']+)', .*")
_NOT_A_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_WRONG_TYPE = re.compile(r"Expected a <class '([\w ]+)'>\. Got value: (.*)")
_WRONG_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)")


def one_line(error: BaseException | str) -> str:
    """Return an error of jsonargparse as one line: the key and the reason.

    For an optional class, the reason is why the configured class is not accepted. The text of any
    other error is returned with its line breaks replaced by spaces.
    """
    text = " ".join(str(error).split())
    special = _wrong_lightning(text) or _default_without_yaml(text)
    if special is not None:
        return special
    keys = _KEY.findall(text)
    key = ".".join(keys)
    while match := _UNION.fullmatch(_KEY.sub("", text)):
        text = _reason_in_union(match)
    text = _WRAPPED.sub("", _KEY.sub("", text))
    nested = _NESTED_KEY.fullmatch(text)
    if nested is not None:
        return f"{key}.{nested[1]}: there is no such key; {key} has none below it"
    line = text
    if keys:
        line = f"{key}: {text}"
    if _SPARSE_ENGINE.match(line):
        return "study.engine is 'sparse'; it must be 'single'. The engine 'sparse' was removed."
    wrong = _WRONG_TYPE.fullmatch(text)
    if wrong is not None and keys:
        return f"{key} is {wrong[2]!r}; it must be of type {wrong[1]}"
    wrong = _WRONG_LITERAL.fullmatch(text)
    if wrong is not None and keys:
        return f"{key} is {wrong[2]!r}; it must be one of {wrong[1]}"
    return line


def _wrong_lightning(text: str) -> str | None:
    """Return the line for a class of pytorch_lightning in place of one of lightning.pytorch."""
    match = _NOT_A_SUBCLASS.search(text)
    if match is None:
        return None
    path, expected = match.groups()
    module, _, name = path.rpartition(".")
    bases = getattr(getattr(sys.modules.get(module), name, None), "__mro__", ())
    if not any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in bases):
        return None
    return (
        f"{path} is a {expected} of pytorch_lightning, not of lightning.pytorch: import that in "
        "its place"
    )


def _default_without_yaml(text: str) -> str | None:
    """Return the line for a class with a default value that YAML cannot represent."""
    if "cannot represent an object" not in text:
        return None
    match = _NO_YAML.search(text)
    if match is None:
        return None
    return (
        f"{match['cls']}: the default of {match['key']}, {match['default']}, has no form in "
        f"YAML; set {match['key']}: {match['value']}"
    )


def _reason_in_union(match: re.Match[str]) -> str:
    """Return why a value fits no type of a Union: for the last type that may have been meant.

    Args:
        match: A match of `_UNION`. Its group has one reason for each type.
    """
    reasons = [reason.removeprefix("- ") for reason in re.split(r" (?=- )", match[1])]
    relevant = [reason for reason in reasons if not reason.startswith(_NOT_MEANT)]
    relevant = [reason.split(" Given value type:")[0] for reason in relevant or reasons]
    given = _GIVEN_VALUE.search(match[0])
    if given is None:
        return relevant[-1]
    if _BUILTIN_TYPE.fullmatch(relevant[-1]):
        return f"Expected a <class '{_type_names(reasons)}'>. Got value: {given[1]}"
    literals = [_LITERAL.fullmatch(reason) for reason in relevant]
    if all(literals):  # as the trainer's precision has it
        values = _distinct_literals([literal[1] for literal in literals if literal])
        return f"Expected a typing.Literal[{', '.join(values)}]. Got value: {given[1]}"
    return relevant[-1]


def _type_names(reasons: list[str]) -> str:
    """Return the types that reasons expect, each once, such as "int or null"."""
    names: dict[str, None] = {}
    for reason in reasons:
        match = _BUILTIN_TYPE.match(reason)
        if match is not None:
            names[match[1]] = None
    return " or ".join(names).replace("NoneType", "null")


def _distinct_literals(literals: list[str]) -> list[str]:
    """Return all values of literals such as "64, '32-true'"; 64 and '64' count as one."""
    values: dict[str, str] = {}
    for literal in literals:
        for value in literal.split(", "):
            values.setdefault(value.strip("'"), value)
    return list(values.values())
