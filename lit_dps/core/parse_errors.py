"""Translates jsonargparse's errors into one line: the key, the value, and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.registry import OWN_MODULE, argument_names, imported_class
from lit_dps.core.text import closest_name

# Types of values in the words of a configuration file, by the name of the type.
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "NoneType": "null",
    **dict.fromkeys(("list", "tuple", "set"), "a list, such as [1, 2]"),
    "dict": "keys with values, such as {key: value}",
}
NOT_FINITE = ("nan", "inf", "-inf", ".nan", ".inf", "-.inf")
# Reasons of types that a value was not meant to have: null, for an optional class, or a path.
_NOT_MEANT = "Expected a <class 'NoneType'>", "Expected <class 'NoneType'>", "Expected a path"
_KEY = re.compile(r'Parser key "([^"]+)": ')
_WRAPPED = re.compile(
    r"Problem with given class_path '([^']*)': (?=Problem|Option|Expected|.*required)"
)
_UNION = re.compile(
    r".*?Does not validate against any of the Union subtypes Subtypes: \[.*?\] Errors: (- .*)"
)
_BUILTIN_TYPE = re.compile(r"(?:- )?Expected (?:a )?<class '(\w+)'>")
_GIVEN_VALUE = re.compile(r" Given value: ?(.*?)(?= - (?:Expected|Problem)|$)")
_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*)\]")
_NUMERIC_LITERAL = re.compile(r"typing\.Literal\[-?\d")
# Begins the words of the values that a Union allows.
ALLOWED = "a value that is "
_NO_YAML = re.compile(
    r"class_path='(?P<cls>[^']+)', init_args=Namespace\((?:[^()]|\([^()]*\))*?"
    r"(?P<key>\w+)=<(?P<default>[\w.]+): (?P<value>[^>]+)>"
)
# Of the key, and of the option `--engine`.
_SPARSE_ENGINE = re.compile(r"(study\.engine|argument --engine): .*\bsparse\b")
_NESTED_KEY = re.compile(r".*Got value: NestedArg\(key='([^']+)', .*")
_NOT_A_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_WRONG_TYPE = re.compile(r"Expected a <class '(\w+)'>\. Got value: (.*)")
_WRONG_LITERAL = re.compile(r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)")
_NOT_ALLOWED = re.compile(r"Expected (.*)\. Got value: (.*)")
_MISSING_MODULE = re.compile(r"given class_path '([\w.]+)': No module named '([\w.]+)'")
_UNKNOWN_ARGUMENT = re.compile(r"Option '([^']+)' is not accepted")


def refusal(error: BaseException | str) -> UserError:
    """Return an error of jsonargparse as an error of one line that names the key.

    Returns:
        A ConfigError for a value of the wrong type, with the value as text. For any other error a
        UserError, whose key is None if the error concerns no key.
    """
    text = " ".join(str(error).split())
    special = _wrong_lightning(text) or _default_without_yaml(text)
    if special is not None:
        return UserError(special)
    keys = _KEY.findall(text)
    key = ".".join(keys)
    while match := _UNION.fullmatch(_KEY.sub("", text)):
        text = _reason_in_union(match)
    text = _KEY.sub("", text)
    classes = _WRAPPED.findall(text)
    text = _WRAPPED.sub("", text)
    unknown = _UNKNOWN_ARGUMENT.fullmatch(text)
    if unknown is not None and classes:
        return _unknown_argument(key, unknown[1], classes[-1])
    nested = _NESTED_KEY.fullmatch(text)
    if nested is not None:
        path = f"{key}.{nested[1]}"
        return UserError(
            f"{path}: there is no such key, because {key} has a value and no keys. Remove {path}.",
            key=path,
        )
    missing = _MISSING_MODULE.search(text)
    if missing is not None and f"{missing[1]}.".startswith(f"{missing[2]}."):
        return UserError(
            f"{key}: {text}. {OWN_MODULE.rstrip('.')}", key=key or None, hint=OWN_MODULE
        )
    if not keys:
        return UserError(text)
    return _wrong_value(key, text) or UserError(f"{key}: {text}", key=key)


def _wrong_value(key: str, text: str) -> ConfigError | None:
    """Return the error of a value of the wrong type; None for another reason."""
    if _SPARSE_ENGINE.match(f"{key}: {text}"):
        return ConfigError(key, "sparse", "single", "The engine 'sparse' was removed.")
    wrong = _WRONG_TYPE.fullmatch(text)
    if wrong is not None and wrong[1] == "float" and wrong[2].lower() in NOT_FINITE:
        return ConfigError(key, wrong[2], "a finite number")
    if wrong is not None:
        return ConfigError(key, wrong[2], TYPE_WORDS.get(wrong[1], f"of type {wrong[1]}"))
    wrong = _WRONG_LITERAL.fullmatch(text)
    if wrong is not None:
        return ConfigError(key, wrong[2], _one_of([wrong[1]]))
    wrong = _NOT_ALLOWED.fullmatch(text)
    if wrong is not None and wrong[1].startswith(ALLOWED):
        return ConfigError(key, wrong[2], wrong[1].removeprefix(ALLOWED))
    return None


def _unknown_argument(key: str, name: str, class_path: str) -> UserError:
    """Return the error of an argument that a class does not take, with its most similar one."""
    path = f"{key}.{name}"
    cls = imported_class(class_path)
    names = [] if cls is None else argument_names(cls)
    message = f"{path}: {name!r} is not accepted by {class_path}"
    near = closest_name(name, names)
    hint = None
    if name in names and cls is not None and cls.__new__ is not object.__new__:
        # jsonargparse reads the signature of `__new__` if a class defines it.
        hint = f"its __new__ hides the arguments of its __init__: name {name} there too"
    elif name in names:
        # Its `**kwargs` do not reach the base class that names the argument.
        hint = f"name {name} in the signature of its __init__"
    elif near is not None:
        hint = f"did you mean {key}.{near}?"
    elif names:
        hint = f"it takes {', '.join(names)}"
    if hint is not None:
        message += f"; {hint}"
    return UserError(message, key=path, allowed=", ".join(names), hint=hint)


def _wrong_lightning(text: str) -> str | None:
    """Return the line for a class of pytorch_lightning in place of one of lightning.pytorch."""
    match = _NOT_A_SUBCLASS.search(text)
    if match is None:
        return None
    path, expected = match.groups()
    bases = getattr(imported_class(path), "__mro__", ())
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
    last = relevant[-1]
    if not _BUILTIN_TYPE.fullmatch(last) and not _LITERAL.fullmatch(last):
        # The reason of a class says more than the types.
        return last
    literals = []
    for reason in relevant:
        literal = _LITERAL.fullmatch(reason)
        if literal is not None:
            literals.append(literal[1])
    allowed = _type_words(reasons)
    if literals and _NUMERIC_LITERAL.search(match[0]):
        allowed = []  # such as the trainer's precision: only some numbers are allowed
    if literals:
        allowed = [_one_of(literals), *allowed]
    return f"Expected {ALLOWED}{' or '.join(allowed)}. Got value: {given[1]}"


def _type_words(reasons: Sequence[str]) -> list[str]:
    """Return the types that reasons expect in words, each once, such as "a number" and "null"."""
    words: dict[str, None] = {}
    for reason in reasons:
        match = _BUILTIN_TYPE.match(reason)
        if match is not None:
            words[TYPE_WORDS.get(match[1], f"of type {match[1]}")] = None
    return list(words)


def _one_of(literals: Sequence[str]) -> str:
    """Return "one of ..." with all values of literals such as "64, '32-true'", each once."""
    values: dict[str, None] = {}
    for literal in literals:
        for value in literal.split(", "):
            values[value.strip("'")] = None
    return f"one of {', '.join(values)}"
