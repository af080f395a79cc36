"""jsonargparse's messages in one line that says what is wrong."""

from __future__ import annotations

import re
import sys

_NOT_MEANT = "Expected a <class 'NoneType'>", "Expected <class 'NoneType'>", "Expected a path"
_KEY = re.compile(r'Parser key "([^"]+)": ')
_WRAPPED = re.compile(r"Problem with given class_path '[^']*': (?=Problem|Option|Expected|.*required)")
_UNION = re.compile(r".*?Does not validate against any of the Union subtypes Subtypes: \[.*?\] Errors: (- .*)")
_PLAIN = re.compile(r"(?:- )?Expected (?:a )?<class '(\w+)'>")
_GIVEN = re.compile(r" Given value: ?(.*?)(?= - (?:Expected|Problem)|$)")
_BELOW = re.compile(r".*Got value: NestedArg\(key='([^']+)', .*")


def _of_the_other_lightning(text: str) -> str | None:
    """What is wrong with a class that is no subclass of Lightning's own because it is one of pytorch_lightning's."""
    match = re.search(r"Import path (\S+) does not correspond to a subclass of (\w+)", text)
    if match is None:
        return None
    module, _, name = match[1].rpartition(".")
    bases = getattr(getattr(sys.modules.get(module), name, None), "__mro__", ())
    if not any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in bases):
        return None
    return f"{match[1]} is a {match[2]} of pytorch_lightning, not of lightning.pytorch: import that in its place"


def condensed(error: BaseException | str) -> str:
    """The key and the reason: of a class that may also be left out, only why the class does not serve."""
    text = " ".join(str(error).split())
    if other := _of_the_other_lightning(text):
        return other
    keys = _KEY.findall(text)
    while match := _UNION.fullmatch(_KEY.sub("", text)):
        reasons = [reason.removeprefix("- ") for reason in re.split(r" (?=- )", match[1])]
        ours = [r for r in reasons if not r.startswith(_NOT_MEANT)]
        text = (ours or reasons)[-1].split(" Given value type:")[0]
        if _PLAIN.fullmatch(text) and (given := _GIVEN.search(match[0])):
            kinds = dict.fromkeys(kind[1] for reason in reasons if (kind := _PLAIN.match(reason)))
            names = " or ".join(kinds).replace("NoneType", "null")
            text = f"Expected a <class '{names}'>. Got value: {given[1]}"
    text = _WRAPPED.sub("", _KEY.sub("", text))
    if match := _BELOW.fullmatch(text):
        key = ".".join(keys)
        return f"{key}.{match[1]}: there is no such key; {key} has none below it"
    text = re.sub(r"Expected a <class '([\w ]+)'>\. Got value: (.*)", r"'\2' is not allowed; \1 expected", text)
    text = re.sub(r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)", r"'\2' is not allowed; one of \1", text)
    return f"{'.'.join(keys)}: {text}" if keys else text
