"""merge: a study that was run in parts, on machines that share nothing, is the study that was run
at once."""

from __future__ import annotations

import lzma

import optuna
import pytest

from tests.e2e.commands import FAST, run_here, table


@pytest.mark.long  # without processes, unit/test_merge.py
def test_parts_that_were_run_apart_make_the_table_of_an_unbroken_run(unbroken, tmp_path):
    for batch_size in (16, 64):
        folder = tmp_path / str(batch_size)
        folder.mkdir()
        done = run_here(folder, "study", "--config", FAST, "--study.batch_sizes", f"[{batch_size}]")
        assert done.returncode == 0, done.stderr
    packed = tmp_path / "64.db.xz"
    packed.write_bytes(lzma.compress((tmp_path / "64/mlruns/study.db").read_bytes()))

    done = run_here(tmp_path, "merge", "sqlite:///16/mlruns/study.db", "64.db.xz")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "study fast: 16 trials taken over, 0 known already, 0 conflicts\n"
    assert run_here(tmp_path, "analyze", "--config", FAST).returncode == 0
    assert table(tmp_path) == table(unbroken)
    done = run_here(tmp_path, "study", "--config", FAST)
    assert (done.returncode, done.stderr) == (0, "study fast: no trials remain\n")
    assert table(tmp_path) == table(unbroken)

    done = run_here(tmp_path, "merge", unbroken / "mlruns" / "study.db")
    assert done.stdout == "study fast: 0 trials taken over, 16 known already, 0 conflicts\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "OTHER is missing"),
        (["missing.db"], "missing.db"),
        (["sqlite:///missing.db"], "sqlite:///missing.db"),
        (["text.db"], "sqlite:///text.db"),
        (["text.db.xz"], "text.db.xz"),
        (["packed-text.db.xz"], "packed-text.db.xz"),
        (["empty.db"], "empty.db has no study"),
        (["none.db"], "none.db"),
        (["none.db", "--study", "fast"], "'fast'"),
        (
            ["none.db", "--storage.optuna", "sqlite:///none.db"],
            "OTHER is 'none.db'; it must be another storage than",
        ),
        (["none.db", "--storage.folder", "text.db"], "text.db"),
        (["none.db", "--studies", "fast"], "studies"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_merged_is_one_line_and_makes_nothing(call, tmp_path, args, said):
    optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/none.db").engine.dispose()
    (tmp_path / "text.db").write_text("text")
    (tmp_path / "text.db.xz").write_text("text")
    (tmp_path / "packed-text.db.xz").write_bytes(lzma.compress(b"text"))
    (tmp_path / "empty.db").touch()
    before = {path.name for path in tmp_path.iterdir()}
    done = call("merge", *args)
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert done.err.startswith("lit-dps: error: ") and said in done.err
    assert {path.name for path in tmp_path.iterdir()} == before
