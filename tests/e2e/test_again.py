"""fit --of: a trial of a stored study once more, with the K that is stored, and its weights."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.config import StorageConfig
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord, cell_text
from lit_dps.core.trial import Cell
from lit_dps.storage.read import read_study
from lit_dps.study.retrain_hint import retrain_hint
from tests.e2e.commands import FAST, run
from tests.support.errors import refuses
from tests.support.fake_study import SPACE, analysis_of, law_results

AXES = {"optim.delay": (0, 4), "model.network": ("a.MLP", "b.Net")}
GRID = {"batch_sizes": (8, 32), "sparsities": (0.0, 0.998046875), "axes": AXES}


def record(**grid) -> StudyRecord:
    return StudyRecord("study", "w", Goal(0.1), SPACE, trials=1, seed=0, goals=(), race_factor=None, config={}, results={},
                       running={}, **{**GRID, **grid})  # fmt: skip


@pytest.mark.slow
def test_a_trial_is_trained_again_to_its_k_and_its_weights_are_kept(call, unbroken, tmp_path):
    shutil.copytree(unbroken / "mlruns", tmp_path / "mlruns")
    found = Analysis(read_study(f"sqlite:///{tmp_path}/mlruns/study.db", "fast"))
    best = found.by_cell[Cell(64, 0.5)].best
    done = call("fit", "--of", "fast", "--cell", "B=64,S=0.5", "--checkpoint", "kept/best.ckpt")
    assert done.code == 0, done.err
    shown, last = done.out.splitlines()
    error = best.curve["val_error"][best.curve["step"].index(best.steps)]
    assert shown == "checkpoint: kept/best.ckpt"
    met = f"the goal is met, val_error {error:.4f} at step {best.steps}"
    assert last == f"complete after {best.steps} steps: {met}; as the study stored it"

    weights = torch.load(tmp_path / "kept/best.ckpt", weights_only=True)["state_dict"]
    kept = {name: (int(weights[name].count_nonzero()), weights[name].numel()) for name in best.kept}
    assert kept == best.kept, "the mask of the trial"
    quiet = ("--trainer.enable_progress_bar", "false")
    again = call("validate", "--config", FAST, "--ckpt_path", "kept/best.ckpt", *quiet)
    assert float(again.out.rsplit("val_error", 1)[1].split()[1]) == pytest.approx(error, abs=1e-6)

    refused = call("fit", "--of", "fast", "--cell", "B=64,S=0.5", "--checkpoint", "kept/best.ckpt")
    assert (refused.code, refused.err) == (
        2,
        "lit-dps: error: --checkpoint is 'kept/best.ckpt'; it must be a file that does not "
        "exist yet\n",
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_checkpoint_of_an_averaged_trial_has_the_average_that_met_the_goal(call, tmp_path):
    average = ("--optim.average_half_life", "300")
    cells = ("--study.batch_sizes", "[64]", "--study.sparsities", "[0.5]")
    assert call("study", "--config", FAST, *average, *cells).code == 0
    found = Analysis(read_study(f"sqlite:///{tmp_path}/mlruns/study.db", "fast"))
    best = found.by_cell[Cell(64, 0.5)].best
    assert best is not None and best.curve is not None and best.steps is not None
    error = best.curve["val_error"][best.curve["step"].index(best.steps)]
    done = call("fit", "--of", "fast", "--cell", "B=64,S=0.5", "--checkpoint", "best.ckpt")
    assert done.out.splitlines()[-1].endswith("as the study stored it")
    quiet = ("--trainer.enable_progress_bar", "false")
    again = call("validate", "--config", FAST, "--ckpt_path", "best.ckpt", *quiet)
    assert float(again.out.rsplit("val_error", 1)[1].split()[1]) == pytest.approx(error, abs=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_a_fit_checks_the_average(tmp_path):
    """An average that never moves keeps the error of the initial network."""
    # In processes of their own: MLflow keeps a database open by its relative path.
    point = ("--model.learning_rate", "0.05", "--goal.max_steps", "400")
    plain = run(tmp_path, "fit", "--config", FAST, *point)
    assert plain.stdout.splitlines()[-1].startswith("complete"), plain.stderr
    frozen = run(tmp_path, "fit", "--config", FAST, *point, "--optim.average_half_life", "1e9")
    assert frozen.stdout.splitlines()[-1].startswith("incomplete"), frozen.stderr


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("B=32,S=0,delay=4,network=MLP", (("model.network", "a.MLP"), ("optim.delay", 4))),
        (
            "B=32,S=0,optim.delay=0,model.network=b.Net",
            (("model.network", "b.Net"), ("optim.delay", 0)),
        ),
        ("B=32 S=0.0 delay=4.0 network=Net", (("model.network", "b.Net"), ("optim.delay", 4))),
    ],
)
def test_a_cell_is_named_by_keys_or_last_names(text, others):
    assert record().parse_cell(text) == Cell(32, 0.0, others)


def test_the_name_of_a_cell_is_the_cell():
    for cell in record().cells:
        assert record().parse_cell(str(cell)) == cell
    assert record(batch_sizes=(8,), axes={}).parse_cell("S=0") == Cell(8, 0.0)


def test_the_stages_of_a_batch_schedule_name_a_cell():
    stages = "0:B/4 2.5%:B/2 10%:B"
    some = record(batch_sizes=(8, 32), axes={"batch.schedule": ("constant", stages)})
    for cell in some.cells:
        assert some.parse_cell(cell_text(cell)) == cell == some.parse_cell(str(cell))
    last = Cell(32, 0.0, (("batch.schedule", stages),))
    assert cell_text(last) == f"B=32,S=0,schedule={stages}"
    assert some.parse_cell(f" schedule={stages}, S=0  B=32") == last


def test_a_comma_is_a_value_of_a_cell():
    some = record(axes={"data.separator": (",", ";"), "data.quote": (",", "|")})
    for cell in some.cells:
        assert some.parse_cell(cell_text(cell)) == cell


@pytest.mark.parametrize(
    "text",
    [
        "B=9,S=0",
        "B=8",
        "",
        "b=8,S=0",
        "B=8,S=x,delay=0,network=MLP",
        "B=8,B=32,S=0,delay=0,network=MLP",
        "B=8,S=0,delay=0,optim.delay=4,network=MLP",
    ],
)
def test_what_names_no_cell_is_refused_with_all_that_there_are(text):
    with refuses("--cell", text) as refused:
        record().parse_cell(text)
    cells = "B=8|32; S=0|0.998047; delay=0|4; network=MLP|Net"
    assert refused.value.allowed is not None and refused.value.allowed.endswith(cells)


def test_the_command_is_of_the_cell_of_the_least_time():
    cells = {cell: law_results(cell, 8, 4e4, 60) for cell in (Cell(4), Cell(64))}
    text = retrain_hint(
        analysis_of(cells, "my study"), StorageConfig(optuna="postgresql://me:secret@db/x")
    )
    # all trials of both take 2 seconds, so that the time is that of the fewest steps over those of
    # the cell
    assert text.startswith("train the best trial again: ") and "secret" not in text
    assert " fit --of 'my study' --cell B=" in text and text.endswith("--checkpoint best.ckpt\n")


@pytest.mark.parametrize("module", ["__main__", "lit_dps_objects", "mine"])
def test_classes_of_a_script_or_notebook_have_no_command(module):
    cell = Cell(4)
    analysis = analysis_of({cell: law_results(cell, 8, 4e4, 60)}, "mine")
    config = {"model": {"class_path": f"{module}.Net"}, "data": {"class_path": "mine.Data"}}
    local = Analysis(dataclasses.replace(analysis.record, config=config))
    assert bool(retrain_hint(local, StorageConfig())) is (module == "mine")


def test_how_a_run_ended_is_said_in_a_line():
    run = Attempt(None, Goal(0.1, check_interval=4, max_steps=12))
    assert run.outcome == "interrupted: before its first check"
    for step, found in ((4, 0.5), (8, 0.25)):
        assert run.record(Validation(step, found, True, 1.0, True)) is None
    assert run.outcome == "interrupted: val_error 0.2500 at step 8"
    run.record(Validation(12, 0.2, True, 1.0, True))
    assert run.outcome == "incomplete: the budget of 12 steps is spent, val_error 0.2000 at step 12"
    run.restart()
    run.enable_early_validations()
    run.record(Validation(4, float("nan"), False, float("nan"), False))
    assert run.outcome == "infeasible: diverged after 4 steps, val_error nan at step 4"
    run = Attempt(None, Goal(0.1, check_interval=4, max_steps=12), train_past_goal=True)
    for step, found in ((4, 0.1), (8, 0.2), (12, 0.05)):
        run.record(Validation(step, found, True, 1.0, True))
    assert run.outcome == (
        "complete after 4 steps: the goal is met, val_error 0.1000 at step 4; "
        "then it ran on to step 12, val_error 0.0500 at step 12"
    )
