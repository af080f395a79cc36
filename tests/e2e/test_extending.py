"""docs/extending.md: its files are written as they stand there, its commands run, and what it says
comes out."""

from __future__ import annotations

import math
import re
import shlex

import pandas as pd
import pytest

import lit_dps
from lit_dps.analysis.summary import summarize
from lit_dps.storage.read import read_study
from tests.e2e.commands import run
from tests.support import pictures
from tests.support.errors import error_line, refuses
from tests.support.recipes import PAGE, write_files


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the files of the page, after its commands; what these said."""
    folder = tmp_path_factory.mktemp("project")
    return folder, commands_of_the_page(folder)


def commands_of_the_page(folder):
    """Write the files of the page into a folder, run its commands there, and return what they
    print, by command. Only the command that is about a figure draws pictures."""
    said = {}
    write_files(folder)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL):
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "lit-dps"
            with pytest.MonkeyPatch.context() as patch:
                if arguments[0] == "figures":
                    patch.delenv(pictures.KEY, raising=False)
                done = run(folder, *arguments)
            assert done.returncode == 0, done.stderr
            said[line.removeprefix("lit-dps ")] = done.stdout
    return said


def cells_of(folder, study="stripes"):
    return pd.read_csv(folder / f"mlruns/figures/{study}/table.csv")


@pytest.mark.slow
def test_a_project_of_its_own_files_runs_a_study(project):
    folder, said = project
    table = cells_of(folder)
    methods = {"snip", "my_pruner.SnipTwice", "my_fan_in.FanIn"}
    assert len(table) == 12 and {*table["method"]} == methods
    assert table["k_star"].notna().all()
    dense = table[table["sparsity"] == 0].pivot(
        index="batch_size", columns="method", values="k_star"
    )
    assert (dense.nunique(axis="columns") == 1).all()  # nothing is pruned
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "stripes")
    kept = {}
    for cell, trials in record.results.items():
        if cell.sparsity:
            kept.setdefault(dict(cell.axes)["pruning.method"], trials[0].kept)
    assert kept["snip"] != kept["my_pruner.SnipTwice"]
    # Of each output one half of its 784 or 32 inputs, and no bias.
    assert kept["my_fan_in.FanIn"] == {
        "network.1.weight": (784 * 16, 784 * 32),
        "network.3.weight": (16 * 10, 32 * 10),
    }
    assert "method=SnipTwice" in said["study --config stripes.yaml"]


@pytest.mark.slow
def test_its_readings_are_in_the_tables(project):
    folder, _ = project
    cells = cells_of(folder)
    curves = pd.read_csv(folder / "mlruns/figures/stripes/readings.csv")
    assert cells["sharpness"].notna().all() and curves["sharpness"].notna().all()
    for _, cell in cells.iterrows():
        rows = curves
        for column in ("batch_size", "sparsity", "method", "point"):
            rows = rows[rows[column] == cell[column]]
        at_goal = rows[rows["step"] == cell["k_star"]]
        assert at_goal["sharpness"].tolist() == [cell["sharpness"]]
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "stripes")
    loads = set()
    for trials in record.results.values():
        for result in trials:
            loads.add(result.end_readings.get("load"))
    assert {*cells["load"]} <= loads - {None}


@pytest.mark.slow
def test_a_statistic_of_its_own_is_what_k_star_is(project, monkeypatch):
    folder, said = project
    url = f"sqlite:///{folder}/mlruns/study.db"
    with refuses("study.statistic", "my_statistic.BestTwo"):
        read_study(url, "mean")
    monkeypatch.syspath_prepend(folder)
    cells = summarize(read_study(url, "mean"))
    for cell in cells:
        best = sorted(k for k in cell.costs if k is not None)[:2]
        k_star = None
        if len(best) == 2:
            k_star = math.ceil(math.sqrt(best[0] * best[1]) - 1e-6)
        assert cell.k_star == k_star, cell
    assert any(cell.k_star is not None for cell in cells)
    (text,) = (text for text in said.values() if "study mean, " in text)
    sentence = "K* is the geometric mean of the steps of the best two trials"
    assert sentence in " ".join(text.split())


@pytest.mark.slow
def test_its_figure_is_drawn(project, monkeypatch):
    folder, said = project
    drawn = folder / "mlruns/figures/stripes"
    figure = said["figures stripes --only my_figure"]
    assert (
        "success.{csv,png,pdf}" in figure
        and "note: trials that racing stopped early count as misses" in figure
    )
    assert (drawn / "success.png").read_bytes().startswith(b"\x89PNG")
    rows = pd.read_csv(drawn / "success.csv")
    assert len(rows) == 12 and 'data-file="stripes-success"' in (drawn / "report.html").read_text()
    monkeypatch.syspath_prepend(folder)
    axes = lit_dps.load("stripes", folder / "mlruns").plot("my_figure").axes[0]
    shares = []
    for line in axes.get_lines():
        shares += list(line.get_ydata())
    assert sorted(shares) == sorted(rows["success"])
    done = run(folder, "figures", "stripes", "--only", "my_rule")
    assert done.returncode == 2 and "my_rule" in error_line(done.stderr)


@pytest.mark.slow
def test_its_goals_are_met_by_their_rules(project, monkeypatch):
    folder = project[0]
    monkeypatch.syspath_prepend(folder)
    limit = 0.2 + 1e-7  # an error is a float32 number
    for name, checks in (("mean", 3), ("settled", 3)):
        record = read_study(f"sqlite:///{folder}/mlruns/study.db", name)
        complete = [r for trials in record.results.values() for r in trials if r.steps is not None]
        assert complete
        for result in complete:
            errors = result.curve["val_error"]
            assert result.steps == result.curve["step"][-1] >= 2 * checks
            assert "exact" not in result.curve
            if name == "mean":
                assert sum(errors[-3:]) / 3 <= limit
                assert all(sum(errors[i : i + 3]) / 3 > limit for i in range(len(errors) - 3))
            else:
                assert errors.index(min(errors)) == len(errors) - 3 and min(errors) <= limit


@pytest.mark.slow
def test_its_trials_have_their_seconds(project):
    folder = project[0]
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "seconds")
    seconds = []
    for trials in record.results.values():
        for result in trials:
            clock = result.curve["seconds"]
            assert clock[0] > 0 and clock == sorted(clock) and clock[-1] < result.seconds
            if result.steps is not None:
                seconds.append(clock[-1])
    table = pd.read_csv(folder / "mlruns/figures/seconds/metaparameters.csv")
    assert table["seconds"].dropna().tolist() == pytest.approx(seconds) and seconds


@pytest.mark.slow
def test_its_batches_grow_and_their_examples_are_counted(project):
    table = pd.read_csv(project[0] / "mlruns/figures/warm-up/metaparameters.csv")
    complete = table.dropna(subset=["steps"])
    assert len(complete)
    for _, row in complete.iterrows():
        steps = int(row["steps"])
        # 3 steps of 8 examples, 6 steps of 16, then steps of 32.
        counted = 8 * min(steps, 3) + 16 * min(max(steps - 3, 0), 6) + 32 * max(steps - 9, 0)
        assert row["examples"] == counted


@pytest.mark.slow
def test_its_rule_is_trained_alike_by_all_engines(project, monkeypatch):
    from lit_dps.core.trial import Cell, Trial
    from tests.support.conformance import assert_conform
    from tests.support.fake_study import Goal
    from tests.support.runs import Workload, train

    monkeypatch.syspath_prepend(project[0])
    network = {"class_path": "my_network.Tanh"}
    arguments = {"network": network, "optimizer": "my_rule.SIGN"}
    workload = Workload(
        {"class_path": "lit_dps.module.ImageClassifier", "init_args": arguments},
        {"class_path": "my_data.Stripes", "init_args": {}},
        {"accelerator": "cpu"},
    )
    goal = {"error": 0.2, "check_interval": 8, "max_steps": 64, "early_reject": False}
    rates = (3e-4, 1e-3, 3e-3)
    trials = [
        Trial(Cell(32, 0.8), i, {"model.learning_rate": rate}) for i, rate in enumerate(rates)
    ]
    lightning, alone, stacked = (
        train(trials, workload, goal, lean=lean, size=size)
        for lean, size in ((False, 1), (True, 1), (True, 3))
    )
    assert_conform(alone, lightning, Goal(0.2, 8, 64), 150)
    assert_conform(stacked, lightning, Goal(0.2, 8, 64), 150)
    assert all("stacked" in result.flags for result in stacked)
