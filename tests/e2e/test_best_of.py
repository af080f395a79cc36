"""study.best_of: the winners of another study again, on other seeds."""

from __future__ import annotations

import re

import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.storage.database import open_storage
from lit_dps.storage.read import read_study
from lit_dps.storage.stored_format import study_attributes
from tests.e2e.commands import FAST, run_here
from tests.support.errors import refusals_in

SMALL = ("study", "--config", FAST, "--study.batch_sizes", "[16]", "--study.trials", 3)
WINNERS = (*SMALL, "--study.name", "winners", "--study.best_of", "fast")


def url(folder) -> str:
    return f"sqlite:///{folder}/mlruns/study.db"


@pytest.mark.long  # tests/unit/storage/test_best_of.py has the points
def test_all_trials_of_a_cell_are_at_the_best_point_of_the_other_study(tmp_path):
    assert run_here(tmp_path, *SMALL).returncode == 0
    done = run_here(tmp_path, *WINNERS, "--smoothness.interval", 4)
    assert done.returncode == 0, done.stderr
    search, winners = (Analysis(read_study(url(tmp_path), name)) for name in ("fast", "winners"))
    for cell in search.cells:
        results = winners.record.results[cell.cell]
        assert [r.trial.params for r in results] == [dict(cell.best.trial.params)] * 3
        assert len({tuple(r.curve["train_loss"]) for r in results}) == 3, "seeds of their own"
        assert all(r.readings["lipschitz"]["lipschitz"] for r in results)
    assert "the best sample of study fast" in done.stdout
    assert (
        "best_of" not in study_attributes(open_storage(url(tmp_path)), "fast")["identity"]["study"]
    )

    other = run_here(tmp_path, *WINNERS)  # without measurements: another study
    assert other.returncode == 2 and "smoothness" in other.stderr
    wider = run_here(tmp_path, *WINNERS, "--smoothness.interval", 4, "--extend-space")
    assert wider.returncode == 2 and refusals_in(wider.stderr) == [("study.best_of", "'fast'")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--study.best_of", "nowhere"], r"'nowhere'.*\bfast\b"),
        (
            ["--study.batch_sizes", "[16, 32]"],
            r"study.best_of is 'fast'; .*B=32 S=0",
        ),
        (
            ["--study.sampler", "tpe"],
            r"study.sampler is 'tpe'; it must be sobol",
        ),
        (
            ["--study.best_of", "winners"],
            r"study.best_of is 'winners'; ",
        ),
        (
            ["--study.space.model.momentum.high", "0.5001"],
            r"study.space.model.momentum is .* 0\.\d+, .*B=16 S=0",
        ),
    ],
)
def test_what_cannot_be_the_best_of_another_is_refused(search, options, said):
    before = study_attributes(open_storage(url(search)), "fast")
    done = run_here(search, *WINNERS, *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(said, done.stderr), done.stderr
    assert study_attributes(open_storage(url(search)), "fast") == before


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    assert run_here(folder, *SMALL).returncode == 0
    return folder
