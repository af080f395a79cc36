"""The verb `figures`: one study, several, some of the figures, another goal, and what it
refuses."""

from __future__ import annotations

import pytest

from lit_dps.cli import main
from lit_dps.cli.figures import LONGEST, comparison_name
from lit_dps.report.publish import STAMP
from tests.e2e.test_commands import run_without
from tests.support.fake_study import Goal, law_study, write_study
from tests.unit.report.test_figure_files import TABLES, files_of

pytestmark = pytest.mark.pictures

RULES = ("sgd", "momentum")


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Two studies of made-up trials, in a folder as a study leaves it."""
    folder = tmp_path_factory.mktemp("figures") / "mlruns"
    folder.mkdir()
    for rule in RULES:
        law_study(
            f"sqlite:///{folder}/study.db",
            f"digits-{rule}",
            batch_sizes=(16, 64, 256),
            laws={0.0: (4e4, 60), 0.9: (9e4, 90)},
            trials=4,
            measure=rule == "sgd",
            goal=Goal(0.1, 16, 40_000),
            config={"model": {"init_args": {"optimizer": rule}}},
        )
    return folder


@pytest.fixture
def figures(storage, monkeypatch, capfd):
    """Runs the verb where the studies are; returns its exit code and what it said."""

    def run(*args: object) -> tuple[int, str]:
        monkeypatch.chdir(storage.parent)
        code = main(["figures", *map(str, args)])
        said = capfd.readouterr()
        return code, said.err if code else said.out

    return run


@pytest.mark.long  # draws everything twice; test_commands.py analyzes without torch
def test_the_set_of_one_study_is_what_analyze_writes_and_needs_no_torch(storage):
    done = run_without(
        {"torch", "lightning", "mlflow", "torchvision"}, storage.parent, "figures", "digits-sgd"
    )
    assert done.returncode == 0, done.stderr
    folder = storage / "figures" / "digits-sgd"
    written = {path: path.read_bytes() for path in folder.iterdir()}
    stems = ("scaling", "metaparameters", "lipschitz", "logs", "ratios", "rates")
    others = {"answer.csv", "lipschitz-mean.csv", "rates-prices.csv", "report.html"}
    assert {path.name for path in written} == {*TABLES, *files_of(*stems), *others}
    assert done.stdout.startswith("written:\n  mlruns/figures/digits-sgd/table.{txt,csv}\n")
    for path in written:
        path.unlink()
    analyzed = run_without(
        {"torch"}, storage.parent, "analyze", "--study.name", "digits-sgd", "--show", "files"
    )
    assert analyzed.returncode == 0, analyzed.stderr
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != STAMP} == written
    page = "mlruns/figures/digits-sgd/report.html"
    more, end = analyzed.stdout.partition(done.stdout)[2].splitlines()[:2]
    assert end.startswith(f"report: {page}") and "theory (Lee" not in analyzed.stdout, (
        "the theory only if it is asked for"
    )
    # No terms of the theory were measured.
    assert "critical" in more and "theory" not in more and "files" not in more


def test_several_studies_are_compared(figures, tmp_path):
    code, said = figures(
        "digits-sgd",
        "digits-momentum",
        "--only",
        "lipschitz, optimizers,ratios",
        "--output",
        tmp_path,
    )
    assert code == 0, said
    assert {path.name for path in tmp_path.iterdir()} == {
        *files_of("optimizers", "ratios"),
        *("digits-sgd", "digits-momentum"),
    }
    assert {path.name for path in (tmp_path / "digits-sgd").iterdir()} == {
        *files_of("lipschitz", "ratios"),
        "lipschitz-mean.csv",
    }
    header, *rows = (tmp_path / "optimizers.csv").read_text().splitlines()
    assert {row.split(",")[header.split(",").index("label")] for row in rows} == set(RULES)
    missing = "no Lipschitz measurements (smoothness.interval is not set): no lipschitz figure"
    assert " ".join(said.split()).endswith(f" note: digits-momentum: {missing}")


def test_another_goal_has_its_own_folder(figures, storage):
    code, said = figures("digits-sgd", "digits-momentum", "--only", "optimizers", "--goal", "0.3")
    assert (code, " ".join(said.split())) == (
        0,
        "written: "
        "mlruns/figures/compare-digits-sgd-momentum/goal-0.3/optimizers.{csv,png,pdf} "
        "note: K* at the first validation, or of fewer than half of the trials, are upper bounds. "
        "They are drawn hollow, with an arrow, and not normalised.",
    )
    at_own_goal = figures("digits-sgd", "digits-momentum", "--only", "optimizers")
    assert at_own_goal[0] == 0
    folder = storage / "figures" / "compare-digits-sgd-momentum"
    own, further = (
        (folder / path).read_text() for path in ("optimizers.csv", "goal-0.3/optimizers.csv")
    )
    assert own != further


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "digits-momentum, digits-sgd"),
        (
            ["digits"],
            "digits-momentum, digits-sgd",
        ),
        (["digits-sgd", "digits"], "no study 'digits'"),
        (
            ["digits-sgd", "--only", "scaling,curves"],
            "--only is 'curves'; it must be any of scaling, ",
        ),
        (
            ["digits-sgd", "--only", "optimizers"],
            "--only is 'optimizers'; it must be any of scaling, ",
        ),
        (["digits-sgd", "--only", ""], "--only is ''; it must be any of "),
        (["digits-sgd", "--goal", "0.05"], "--goal is 0.05; it must be at least 0.1"),
        (["digits-sgd", "--goal", "1.5"], "--goal is 1.5"),
        (["digits-sgd", "--goal", "low"], "low"),
        (["digits-sgd", "--storage.folder", "nowhere"], "nowhere/study.db"),
    ],
)
def test_what_does_not_serve_is_refused_in_one_line(figures, storage, args, said):
    before = sorted(storage.parent.rglob("*"))
    code, error = figures(*args)
    assert code == 2
    assert error.startswith("lit-dps: error: ") and error.count("\n") == 1
    assert said in error
    assert sorted(storage.parent.rglob("*")) == before


def test_a_study_without_anything_to_draw_says_so(figures, storage, tmp_path):
    write_study(
        f"sqlite:///{storage}/study.db", {}, "empty", batch_sizes=[8], sparsities=[0.0], trials=3
    )
    code, said = figures(
        "empty", "--output", tmp_path / "new", "--only", "scaling,logs,metaparameters"
    )
    assert (code, said.splitlines()) == (
        0,
        [
            "nothing written",
            "",
            "note: no trial has met the goal yet: no scaling or logs figure",
            "note: no finished trial yet: no metaparameters figure",
        ],
    )
    assert not (tmp_path / "new").exists()


def test_comparisons_are_named_after_what_their_studies_do_not_share():
    assert (
        comparison_name(["mnist-cnn-sgd", "mnist-cnn-momentum"]) == "compare-mnist-cnn-sgd-momentum"
    )
    assert comparison_name(["mnist-sgd", "mnist-sgd-linear"]) == "compare-mnist-sgd-sgd-linear"
    assert comparison_name(["digits", "dig"]) == "compare-digits-dig"
    long = [comparison_name([letter * 90, "b" * 90]) for letter in "ac"]
    assert len(set(long)) == 2 and {len(name) for name in long} == {LONGEST}
