"""Hashes of the user's own code: what changes them, and what does not."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from lit_dps.core.environment import (
    SOURCES,
    UNKNOWN,
    Environment,
    changed_parts,
    described_otherwise,
    is_same_source,
    versions_of,
)
from lit_dps.core.errors import UserError
from lit_dps.core.user_code import _installed_with_target, is_installed, is_user_file
from lit_dps.study.environment import _with_written_files
from lit_dps.study.sources import (
    import_sources,
    refuse_changed_sources,
    source_hashes,
)
from tests.support.errors import refuses

CODE = '''
"""What it is."""
import math

from helper_of_mine import SCALE


class Net:
    """A network."""

    def forward(self, x):
        """Doubles."""
        return SCALE * x


if __name__ == "__main__":
    print(Net())
'''
HELPER = "SCALE = 2\n"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Imports code of the user anew, and returns the hashes of its two files."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def hashes(code: str = CODE, helper: str = HELPER) -> dict[str, list[str]]:
        (tmp_path / "code_of_mine.py").write_text(code)
        (tmp_path / "helper_of_mine.py").write_text(helper)
        for name in ("code_of_mine", "helper_of_mine"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        importlib.import_module("code_of_mine")
        return {
            name: each for name, each in source_hashes({}).items() if name.endswith("_of_mine.py")
        }

    yield hashes
    for name in ("code_of_mine", "helper_of_mine"):
        sys.modules.pop(name, None)


def changed(was: dict, now: dict) -> list[str]:
    return changed_parts([{SOURCES: was}], {SOURCES: now}, SOURCES)


def test_files_and_what_they_import_are_hashed_and_no_library_is(imported):
    assert imported().keys() == {"code_of_mine.py", "helper_of_mine.py"}
    everything = source_hashes({})
    assert not [
        name
        for name in everything
        if name.startswith(("torch", "lightning", "lit_dps/", "numpy", "json"))
    ]


def test_a_package_that_pip_put_into_a_folder_of_the_path_is_a_library(imported, tmp_path):
    (tmp_path / "bought.py").write_text("COLOR = 1\n")
    (tmp_path / "bought-1.0.dist-info").mkdir()
    (tmp_path / "bought-1.0.dist-info" / "RECORD").write_text(
        "bought.py,,\nbought-1.0.dist-info/RECORD,,\n"
    )
    _installed_with_target.cache_clear()
    is_user_file.cache_clear()
    assert imported("import bought\n" + CODE).keys() == {"code_of_mine.py", "helper_of_mine.py"}
    assert is_installed(sys.modules["bought"]) and not is_installed(sys.modules["code_of_mine"])
    del sys.modules["bought"]
    _installed_with_target.cache_clear()
    is_user_file.cache_clear()


SAME = {
    "a comment": CODE.replace("import math", "import math  # for later"),
    "formatting": CODE.replace("return SCALE * x", "return (SCALE\n            *   x)"),
    "docstrings": CODE.replace("Doubles.", "Returns the double."),
    "no docstring": CODE.replace('        """Doubles."""\n', ""),
    "what a script runs": CODE.replace("print(Net())", "print(1)"),
    "moved down": "\n\n" + CODE,
}
OTHER = {
    "a number": CODE.replace("SCALE * x", "SCALE * x * 2"),
    "a text": CODE.replace("return SCALE * x", 'return "x"'),
    "an attribute": CODE.replace("    def forward", "    rate = 1\n\n    def forward"),
    "what an import runs": CODE + "else:\n    SCALE = 3\n",
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_no_result_changes_no_version(name, imported):
    assert SAME[name] != CODE
    assert changed(imported(), imported(SAME[name])) == []


@pytest.mark.parametrize("name", OTHER)
def test_another_statement_is_another_version(name, imported):
    assert OTHER[name] != CODE
    assert changed(imported(), imported(OTHER[name])) == ["code_of_mine.py"]


def test_a_module_that_the_module_imports_is_told_by_its_own_name(imported):
    assert changed(imported(), imported(helper="SCALE = 3\n")) == ["helper_of_mine.py"]


def test_equal_bytes_are_the_same_version_under_a_python_whose_trees_differ(imported):
    hashes = imported()
    other_python = {name: [content, "another tree"] for name, (content, _) in hashes.items()}
    assert changed(other_python, hashes) == []


def test_each_of_several_versions_is_known_and_a_new_file_is_no_change(imported):
    first, second, third = (
        imported(),
        imported(helper="SCALE = 3\n"),
        imported(helper="SCALE = 4\n"),
    )
    known = [{SOURCES: first}, {SOURCES: {"other.py": ["1"]}}, {SOURCES: second}, {}]
    assert changed_parts(known, {SOURCES: {**first, "new.py": ["2"]}}, SOURCES) == []
    assert changed_parts(known, {SOURCES: third}, SOURCES) == ["helper_of_mine.py"]
    assert changed_parts([{}], {SOURCES: third}, SOURCES) == [], "an earlier version kept no hashes"


def main_with(monkeypatch, tmp_path, name: str, code: str, file: bool) -> dict[str, list[str]]:
    """The hashes of a class of a script that is run, or of a notebook whose source nobody knows."""
    module = types.ModuleType("__main__")
    path = tmp_path / name
    if file:
        path.write_text(code)
        module.__file__ = str(path)
    exec(compile(code, str(path), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    config = {"model": {"class_path": "__main__.Net"}, "study": {"grid": {"a": [1]}}}
    hashes = source_hashes(config, is_start=True)
    return {key: value for key, value in hashes.items() if key.startswith("__main__")}


CLASS = "class Net:\n    def forward(self, x):\n        return 2 * x\n"


def test_a_class_of_the_script_is_hashed_by_itself(monkeypatch, tmp_path):
    one = main_with(monkeypatch, tmp_path, "one.py", CLASS, file=True)
    other = main_with(
        monkeypatch, tmp_path, "two.py", CLASS + "CONFIG = {'trials': 8}\n", file=True
    )
    edited = main_with(monkeypatch, tmp_path, "three.py", CLASS.replace("2", "3"), file=True)
    assert one == other and one.keys() == {"__main__.Net"} and one["__main__.Net"] != UNKNOWN
    assert changed(one, edited) == ["__main__.Net"]


def test_a_class_without_a_source_has_the_hash_of_its_byte_code(monkeypatch, tmp_path):
    one = main_with(monkeypatch, tmp_path, "gone.py", CLASS, file=False)
    again = main_with(monkeypatch, tmp_path, "gone.py", CLASS, file=False)
    other = main_with(monkeypatch, tmp_path, "gone.py", CLASS.replace("2", "3"), file=False)
    assert one == again and changed(one, other) == ["__main__.Net"]
    assert changed({"__main__.Net": UNKNOWN}, {"__main__.Net": ["1"]}) == []


def test_hashes_of_earlier_versions_of_a_class_are_accepted(monkeypatch, tmp_path):
    hashes = main_with(monkeypatch, tmp_path, "one.py", CLASS, file=True)["__main__.Net"]
    for former in (["1"], ["1", "2"], ["1", "2", "3"]):
        assert is_same_source(former, hashes) and is_same_source(hashes, former)
    assert not is_same_source([hashes[0][:-1]], hashes)
    edited = main_with(monkeypatch, tmp_path, "two.py", CLASS.replace("2", "3"), file=True)
    assert changed({"__main__.Net": ["1", "2"]}, edited) == []
    known = [{SOURCES: {"__main__.Net": each}} for each in (["1", "2"], hashes)]
    assert changed_parts(known, {SOURCES: edited}, SOURCES) == ["__main__.Net"]
    versions = versions_of([*known, {SOURCES: edited}], SOURCES, "__main__.Net")
    assert [len(each) for each in versions] == [2, 1]
    # Of two stored versions with three hashes, the third one decides nothing.
    assert not is_same_source(["1", "2", "3"], ["4", "5", "3"])
    assert is_same_source(["1", "2", "3"], ["1", "5", "6"])
    one, other = ({SOURCES: {"__main__.Net": ["1", tree, former]}} for tree in "23")
    assert Environment(one).code_key != Environment(other).code_key


SCRIPT = """
import math
WIDTH = 3
UNUSED = 1
START = 7
class Block:
    depth = 1
    def grow(self):
        \"\"\"Grows.\"\"\"
        return helper()
def helper():
    return WIDTH + START
class Base:
    rate = 1
class Net(Base):
    def __init__(self):
        self.block = Block()
"""


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("WIDTH = 3", "WIDTH = 4", ["__main__.WIDTH"]),
        ("depth = 1", "depth = 2", ["__main__.Block.depth"]),
        ("rate = 1", "rate = 2", ["__main__.Base.rate"]),
        ("rate = 1", "rate, more = 1, 1", ["__main__.Base"]),
        ("WIDTH + START", "WIDTH - START", ["__main__.helper"]),
        ("self.block = Block()", "self.block = Block", ["__main__.Net"]),
        ("UNUSED = 1", "UNUSED = 2", []),
        ("Grows.", "Returns the width.", []),
        ("import math", "import math  # a comment", []),
        ("START = 7", "START = 8", ["__main__.START"]),
    ],
)
def test_what_a_class_of_the_script_uses_is_hashed_by_its_own_name(
    monkeypatch, tmp_path, old, new, names
):
    one = main_with(monkeypatch, tmp_path, "one.py", SCRIPT, file=True)
    other = main_with(monkeypatch, tmp_path, "two.py", SCRIPT.replace(old, new), file=True)
    assert changed(one, other) == names
    assert "__main__.UNUSED" not in one


def test_a_value_that_the_model_changes_is_unknown_though_the_data_only_reads_it(
    monkeypatch, tmp_path
):
    code = "COUNT = 0\nclass Net:\n    def step(self):\n        global COUNT\n        COUNT += 1\n"
    code += "class Data:\n    def step(self): return COUNT\n"
    main_with(monkeypatch, tmp_path, "one.py", code, file=True)
    for paths in (["__main__.Net", "__main__.Data"], ["__main__.Data", "__main__.Net"]):
        hashes = source_hashes(paths, is_start=True)
        assert hashes["__main__.COUNT"] == UNKNOWN


def test_a_file_of_figures_is_code_if_the_model_is_in_it(imported):
    imported()
    config = {"study": {"figures": ["code_of_mine"]}, "model": {"class_path": "code_of_mine.Net"}}
    assert "code_of_mine.py" in source_hashes(config)
    config["model"]["class_path"] = "helper_of_mine.Net"
    assert "code_of_mine.py" not in source_hashes(config)


def test_a_file_that_was_edited_after_its_import_is_refused(imported, tmp_path):
    imported()
    source_hashes({}, is_start=True)
    file = tmp_path / "code_of_mine.py"
    file.write_text(CODE.replace("SCALE * x", "SCALE + x"))
    with refuses(None, str(file), error=UserError):
        source_hashes({}, is_start=True)
    importlib.reload(sys.modules["code_of_mine"])
    source_hashes({}, is_start=True)


def test_code_that_is_not_what_the_command_began_with_is_refused():
    began = {"a.py": ["bytes", "tree"], "b.py": ["bytes", "tree"], "c.py": UNKNOWN}
    reformatted = {"a.py": ["other bytes", "tree"], "c.py": ["bytes", "tree"], "new.py": ["x", "y"]}
    refuse_changed_sources(began, reformatted)
    with refuses(None, ["b.py"], error=UserError):
        refuse_changed_sources(began, {**reformatted, "b.py": ["other", "others"]})


def test_the_modules_of_another_process_are_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("known_there", "unknown_there"):
        (tmp_path / f"{name}.py").write_text("class Net: pass")
    config = {
        "model": {"class_path": "known_there.Net"},
        "data": "unknown_there.Net",
        "name": "a.b",
    }
    import_sources(config, {"known_there.py": UNKNOWN})
    assert "known_there" in sys.modules and "unknown_there" not in sys.modules
    monkeypatch.delitem(sys.modules, "known_there")


EDITED = (
    "class Net:\n    @property\n    def two(self): return 2\ndef one(): return 1\nf = lambda: 0\n"
)


@pytest.mark.parametrize(
    ("old", "new", "is_refused"),
    [
        ("class", "# a comment\n\nclass", False),
        ("def one(): return 1\n", "", False),
        ("def one(): return 1", "def first(): return 1", False),
        ("return 2", "return 3", True),
        ("return 1", "return 3", True),
    ],
)
def test_an_edited_function_is_refused_and_a_moved_or_removed_one_is_not(
    tmp_path, monkeypatch, old, new, is_refused
):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_of_mine.py"
    file.write_text(EDITED)
    sys.modules.pop("edited_of_mine", None)
    module = importlib.import_module("edited_of_mine")
    file.write_text(EDITED.replace(old, new))
    if is_refused:
        with refuses(None, str(file), error=UserError):
            source_hashes({}, is_start=True)
    # A reloaded module still has the removed functions.
    importlib.reload(module)
    source_hashes({}, is_start=True)
    assert module.Net().two in (2, 3)


def test_objects_that_another_version_described_are_named():
    stored = {"a": ["text 3: 1"], "b": ["text 4: 1"], "c": ["text 4 of Python 3.11: 1"]}
    now = {"a": ["text 4: 1"], "b": ["text 4: 2"], "c": ["text 4 of Python 3.12: 1"], "d": ["1"]}
    assert described_otherwise({SOURCES: stored}, {SOURCES: now}) == ["a", "c"]
    assert changed_parts([{SOURCES: stored}], {SOURCES: now}, SOURCES) == ["b"]


class Pretrained:
    """A network that reads a file."""

    def __init__(self, checkpoint: str = "dense.ckpt", width: int = 3):
        self.checkpoint = checkpoint


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"class_path": f"{__name__}.Pretrained"}},
        {"model": {"init_args": {"checkpoint": "dense.ckpt"}}},
        {"study": {"grid": {"model.checkpoint": ["other.ckpt", "dense.ckpt"]}}},
        {"study": {"space": {"model.checkpoint": {"choices": ["dense.ckpt"]}}}},
    ],
)
def test_the_content_of_a_file_that_the_model_names_is_hashed(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config["data"] = {"root": "data.csv"}
    name = "file dense.ckpt"
    assert name not in source_hashes(config, is_start=True)
    (tmp_path / "data.csv").write_bytes(b"1")
    checkpoint = tmp_path / "dense.ckpt"
    checkpoint.write_bytes(b"\x00\xff1")
    assert source_hashes(config)[name] == UNKNOWN  # the dry run made it
    before = source_hashes(config, is_start=True)
    assert not [each for each in before if "data.csv" in each]
    assert source_hashes(config)[name] == before[name] != UNKNOWN
    checkpoint.write_bytes(b"\x00\xff22")
    written = source_hashes(config)
    assert written[name] == UNKNOWN  # the model may write it
    now = source_hashes(config, is_start=True)
    refuse_changed_sources(before, now)
    assert changed_parts([{SOURCES: before}], {SOURCES: now}, SOURCES) == [name]
    assert Environment({SOURCES: before}).code_key == Environment({SOURCES: now}).code_key
    # An earlier run knew that trials write the file, and a later one was killed.
    stored = [{SOURCES: written}, {SOURCES: before}]
    assert changed_parts(stored, {SOURCES: now}, SOURCES) == []
    assert changed_parts(stored[::-1], {SOURCES: now}, SOURCES) == []
    # The checkpoint of an earlier run has the hash of its start.
    sources = _with_written_files(now, stored)
    assert sources == {**now, name: UNKNOWN} and _with_written_files(now, stored[1:]) == now
    assert changed_parts([{SOURCES: before}], {SOURCES: sources}, SOURCES) == []


def test_an_unknown_constant_hides_no_change_of_a_known_one():
    stored = [{SOURCES: {"WIDTH": UNKNOWN}}, {SOURCES: {"WIDTH": ["1"]}}]
    assert changed_parts(stored, {SOURCES: {"WIDTH": ["2"]}}, SOURCES) == ["WIDTH"]
