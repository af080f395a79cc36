"""Pruned weights are exactly zero, in each batch and each check, whatever else moves weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.zoo.run import spec, study
from tests.zoo.verify import assert_refused, assert_works

NEVER = {"monitor": "val_loss", "error": 1e-6, "max_steps": 10}
MOVES = ["WithLBFGS", "ClippedWeights"]
MORE = ["WithLookahead", "WithDecay", "WeightNoise", "GradientNoise", "MaxNorm"]


@pytest.fixture
def zoo(tmp_path):
    """Runs a study whose networks are all pruned; test_plain.py has dense ones."""
    return partial(study, tmp_path, sparsities=[0.8])


@pytest.mark.parametrize(
    "name", [*MOVES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_whatever_moves_weights(zoo, name):
    # No checkpoint has the slow weights of WithLookahead: a study with checkpoints refuses it.
    assert_works(zoo(f"optimizers.{name}", goal=NEVER, checkpoint_minutes=None))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_orthogonal_updates(zoo):
    assert_works(zoo("optimizers.WithMuon", goal=NEVER))


@pytest.mark.parametrize(
    ("method", "tells"),
    [
        pytest.param("magnitude", True, marks=pytest.mark.long),
        ("random", False),
        pytest.param("magnitude", False, marks=pytest.mark.long),
        pytest.param("random", True, marks=pytest.mark.long),
    ],
)
def test_manual_optimization(zoo, tells, method):
    assert_works(
        zoo(spec("optimizers.Manual", tells=tells), goal=NEVER, pruning={"method": method})
    )


@pytest.mark.parametrize("tells", [False, pytest.param(True, marks=pytest.mark.long)])
def test_manual_optimization_has_no_loss_for_snip(zoo, tells):
    assert_refused(
        zoo(spec("optimizers.Manual", tells=tells)),
        r"pruning\.method",
        "snip",
        "manual optimization",
    )


@pytest.mark.long
def test_manual_optimization_needs_no_pruning(zoo):
    assert_works(zoo("optimizers.Manual", sparsities=[0.0]))


# test_pruning_pass.py has passes.MovingTeacher too.
@pytest.mark.parametrize(
    "model", ["optimizers.Teacher", pytest.param("passes.MovingTeacher", marks=pytest.mark.long)]
)
def test_a_teacher_has_the_zeros_of_its_student(zoo, model):
    outcome = zoo(model, goal=NEVER, copies={"teacher.": "student."})
    assert_works(outcome)
    sparse = [result for result in outcome.results if result.trial.cell.sparsity]
    assert all(name.startswith("student.") for result in sparse for name in result.kept)


AVERAGES = [
    ("EMAWeightAveraging", {"decay": 0.8}),
    pytest.param("WeightAveraging", {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "options"), AVERAGES)
def test_averages_of_weights(zoo, name, options):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, name):
        pytest.skip(f"this Lightning has no {name}")
    callback = {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": options}
    outcome = zoo(goal=NEVER, trainer={"callbacks": [callback]})
    assert_works(outcome)
    assert all(name in outcome.audit(result).callbacks for result in outcome.results)
