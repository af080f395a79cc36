"""Who may import whom, and which package is imported where: the architecture, kept by a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lit_dps
import lit_dps.analysis

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lit_dps"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What each room may import, beside itself. No room sees one that sees it.
SEES: dict[str, set[str]] = {
    "lit_dps": set(),
    "core": set(),
    "parallel": {"core"},
    "optim": {"core"},
    "models": {"core", "optim"},
    "data": {"core"},
    "pruning": {"core", "parallel"},
    "module": {"core", "parallel", "optim", "models"},
    "storage": {"core"},
    "analysis": {"core"},
}
SEES["training"] = {"core", "parallel", "optim", "pruning", "module", "data"}
SEES["readings"] = {"core", "parallel", "module", "training"}
SEES["testing"] = SEES["readings"] | {"optim", "pruning", "data", "readings"}
SEES["engines"] = SEES["training"] | {"training", "readings"}
SEES["report"] = {"core", "analysis"}
SEES["tracking"] = {"core", "storage", "analysis", "report"}
SEES["replication"] = {"core", "analysis", "report"}
SEES["study"] = SEES["engines"] | SEES["tracking"] | {"models", "engines", "tracking", "testing"}
SEES["forecast"] = SEES["study"] | {"study"}
SEES["advice"] = SEES["forecast"] | {"forecast"}
SEES["advising"] = {"advice"}
SEES["cli"] = SEES["advice"] | {"advice", "replication"}
SEES["api"] = SEES["cli"] | {"cli"}
SEES["__main__"] = {"cli"}

# Third-party package -> the only places that import it.
ONLY_IN = {
    "optuna": {"storage"},
    "sqlalchemy": {"storage"},
    "mlflow": {"tracking"},
    "matplotlib": {"report.figures"},
    "torchvision": {"data"},
    "sklearn": {"data"},
    "pyarrow": {"data"},
    "PIL": {"data", "report.figures"},
    "rich": {"study.display"},
    "jsonargparse": {"cli", "training.workload"},
}
# What the replication may import beside itself, as a user's script may: the names of the public
# faces, and the paper's protocol. None: all names of the module.
PUBLIC = {
    "lit_dps": set(lit_dps._PUBLIC),
    "lit_dps.analysis": set(lit_dps.analysis._PUBLIC),
    "lit_dps.core.paper_protocol": None,
}
NO_TORCH = {
    "core",
    "parallel.process",
    "storage",
    "tracking",
    "analysis",
    "report",
    "replication",
    "api",
    "cli",
}
TORCH = {"cli.advise", "cli.fit", "cli.init", "cli.masks", "cli.study"}


def name_of(path: Path) -> str:
    """Dotted name below lit_dps; the package itself is "lit_dps"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "lit_dps"


def imports(path: Path, for_types: bool = True) -> set[str]:
    """All modules that a file imports, also within functions; those for type checkers on request.

    A public name of the package stands for the module that has it. What the package itself imports
    for type checkers does not count: it imports these modules when they are first used.
    """
    tree = ast.parse(path.read_text())
    if path == PACKAGE / "__init__.py" or not for_types:
        tree.body = [node for node in tree.body if not is_for_types(node)]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "lit_dps":
                names = [alias.name for alias in node.names]
                found |= {lit_dps._PUBLIC.get(name, f"lit_dps.{name}") for name in names}
            else:
                found.add(node.module)
    return found


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def ours(path: Path) -> set[str]:
    """The parts of lit_dps that a file imports, by their first name."""
    return {
        name.split(".")[1] if "." in name else "lit_dps"
        for name in imports(path)
        if name.split(".")[0] == "lit_dps"
    }


def within(name: str, places: set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_see_what_they_may(path):
    room = name_of(path).split(".")[0]
    for other in ours(path) - {room, "__version__", "lit_dps"}:
        assert other in SEES[room], f"{room} imports {other}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "replication").glob("*.py")), ids=name_of)
def test_the_replication_uses_the_public_api_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("lit_dps") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lit_dps":
            if node.module.startswith("lit_dps.replication"):
                continue
            assert node.module in PUBLIC, f"{node.module} is not public"
            names = PUBLIC[node.module]
            if names is not None:
                assert {alias.name for alias in node.names} <= names


def test_public_names_are_those_that_type_checkers_see():
    for face in (lit_dps, lit_dps.analysis):
        tree = ast.parse(Path(face.__file__).read_text())
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        seen = {}
        for node in block.body:
            for alias in node.names:
                seen[alias.name] = node.module
        modules = {}
        for name, module in face._PUBLIC.items():
            modules[name] = module if module.startswith("lit_dps") else f"{face.__name__}.{module}"
        assert seen == modules
        for name in face._PUBLIC:
            assert getattr(face, name) is not None


def test_no_room_sees_one_that_sees_it():
    for room, seen in SEES.items():
        for other in seen:
            assert room not in SEES[other], f"{room} and {other} see each other"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_are_imported_where_they_belong(path):
    for imported in {name.split(".")[0] for name in imports(path)} & ONLY_IN.keys():
        assert within(name_of(path), ONLY_IN[imported]), (
            f"{imported} does not belong into {name_of(path)}"
        )
    if within(name_of(path), NO_TORCH) and not within(name_of(path), TORCH):
        assert not {name.split(".")[0] for name in imports(path)} & {"torch", "lightning"}


def test_no_import_cycles():
    graph = {}
    for path in MODULES:
        known = {f"lit_dps.{name_of(other)}" for other in MODULES} | {"lit_dps"}
        graph[f"lit_dps.{name_of(path)}"] = imports(path, for_types=False) & known
    done, stack = set(), []

    def visit(name: str) -> None:
        assert name not in stack, " -> ".join([*stack, name])
        if name in done:
            return
        stack.append(name)
        for other in graph.get(name, ()):
            visit(other)
        done.add(stack.pop())

    for name in graph:
        visit(name)


def test_nothing_runs_at_import(tmp_path):
    """Importing every module prints nothing and leaves no file behind."""
    names = [f"lit_dps.{name_of(path)}" for path in MODULES if name_of(path) != "lit_dps"]
    code = f"import importlib; [importlib.import_module(name) for name in {names!r}]"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_files_hold_one_idea():
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py"), ROOT / "cli.py"]:
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path} has {lines} lines: it holds two ideas"
