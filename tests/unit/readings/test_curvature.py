"""Batch sharpness and the top eigenvalue, against explicit Hessians."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from lit_dps.readings import Moment
from lit_dps.readings.curvature import Curvature
from lit_dps.readings.registry import resolve_readings
from lit_dps.testing import check_reading
from lit_dps.testing.toy import ToyRun
from tests.support.errors import refuses
from tests.support.runs import train, train_one
from tests.unit.readings.test_readings import GOAL, TRIAL, WORKLOAD


def explicit(loss: Tensor, module: nn.Module, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient (m,) and Hessian (m, m) of a loss by the kept coordinates, in float64."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = []
    for entry in flat:
        row = torch.autograd.grad(entry, weights, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in row]))
    hessian = torch.stack(rows).double()
    return flat.detach().double()[keep], hessian[keep][:, keep]


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_both_are_those_of_the_explicit_hessians(sparsity):
    run = ToyRun(sparsity)
    run.train_step()
    keep = []
    for name, parameter in run.module.named_parameters():
        if id(parameter) not in run.trained:
            continue
        mask = run.masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
        keep.append(mask.flatten())
    kept = torch.cat(keep)
    ratios = []
    whole = 0.0
    examples = 0
    with ExitStack() as stack:
        moment = Moment("explicit", 1, run, stack)
        for loss, size in moment.losses(run.batch_size, 3 * run.batch_size):
            gradient, hessian = explicit(loss, moment.module, kept)
            ratios.append(float(gradient @ hessian @ gradient / (gradient @ gradient)))
            whole = whole + size * hessian
            examples += size
    values = torch.linalg.eigvalsh((whole + whole.T) / 2 / examples)
    torch.manual_seed(0)
    with ExitStack() as stack:
        moment = Moment("curvature", 1, run, stack)
        read = Curvature(batches=3, iterations=300).read(moment)
    assert len(ratios) == 3
    assert read["batch_sharpness"] == pytest.approx(sum(ratios) / 3, rel=1e-4)
    assert read["top_eigenvalue"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-3)


def test_batch_sharpness_is_of_the_batch_size_of_the_cell_alone():
    """The seventh batch of 54 examples has 6 examples."""
    run = ToyRun(0.0)
    sharpness = []
    for batches in (6, 7):
        with ExitStack() as stack:
            read = Curvature(batches, 1).read(Moment("curvature", 1, run, stack))
        sharpness.append(read["batch_sharpness"])
    assert sharpness[0] == sharpness[1]
    run.batch_size = 53  # the only batch has 54 examples, as even batches without a last one may
    with ExitStack() as stack:
        read = Curvature(1, 1).read(Moment("curvature", 1, run, stack))
    assert math.isfinite(read["batch_sharpness"])
    run.batch_size = 60
    with ExitStack() as stack:
        read = Curvature(1, 1).read(Moment("curvature", 1, run, stack))
    assert math.isnan(read["batch_sharpness"]) and math.isfinite(read["top_eigenvalue"])


def test_it_conforms():
    check_reading(Curvature)
    with refuses("study.readings.curvature.batches", 0):
        Curvature(batches=0)


def test_each_loop_reads_the_same():
    readings = resolve_readings([{"class_path": "curvature", "init_args": {"batches": 2}}])
    results = []
    for arguments in ({}, {"lean": False}):
        results.append(train_one(TRIAL, WORKLOAD, GOAL, readings=readings, **arguments))
    (stacked,) = train([TRIAL], WORKLOAD, GOAL, size=2, readings=readings)
    results.append(stacked)
    for result in results:
        assert not result.failure
        for column in ("batch_sharpness", "top_eigenvalue"):
            values = result.readings["curvature"][column]
            assert values == pytest.approx(results[0].readings["curvature"][column], rel=1e-3)
            assert len(values) == len(result.curve["step"]) and all(values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_have_no_curvature(value):
    run = ToyRun(0.0)
    with torch.no_grad():
        next(run.module.parameters()).fill_(value)
    with ExitStack() as stack:
        read = Curvature(batches=2, iterations=3).read(Moment("curvature", 1, run, stack))
    assert math.isnan(read["top_eigenvalue"]) and math.isnan(read["batch_sharpness"])
