"""A pruner and the readings of docs/extending.md: their values."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lit_dps.pruning import Network, prunable
from lit_dps.readings import Moment
from lit_dps.testing.toy import ToyRun, toy_network
from tests.support.errors import refuses
from tests.support.recipes import import_recipe
from tests.support.user_readings import FullHessian


def test_two_of_each_four_weights_along_the_input_are_kept(tmp_path, monkeypatch):
    pruner = import_recipe("my_two_four", tmp_path, monkeypatch).TwoFour()
    module = toy_network(4, 20)
    network = Network(module, prunable(module), 8, lambda: 0, lambda: iter(()), lambda *_: None)
    mask = pruner.mask(network, 0.5, torch.Generator())
    # The filters have 9 inputs, which are not divisible by 4.
    assert {*mask} == {"4.weight", "6.weight"}
    for name, keep in mask.items():
        groups = keep.view(keep.shape[0], keep.shape[1] // 4, 4)
        sizes = module.get_parameter(name).detach().abs().view(groups.shape)
        assert (groups.sum(-1) == 2).all()
        smallest_kept = sizes.masked_fill(~groups, torch.inf).amin(-1)
        assert (smallest_kept >= sizes.masked_fill(groups, 0).amax(-1)).all()
    kept, total = mask.count()
    assert (kept, total) == (390, 780)
    with refuses("study.sparsities", 0.9):
        pruner.mask(network, 0.9, torch.Generator())


def read(reading, run):
    torch.manual_seed(0)
    with ExitStack() as stack:
        return reading.read(Moment(reading.name, 1, 8, run, stack))


def test_the_sharpness_is_the_top_eigenvalue_of_the_hessian(tmp_path, monkeypatch):
    module = import_recipe("my_reading", tmp_path, monkeypatch)
    run = ToyRun(0.0)
    sharpness = read(module.Sharpness(examples=48, iterations=200), run)["sharpness"]
    assert float(sharpness) == pytest.approx(float(read(FullHessian(), run)["top"]), rel=1e-3)


def test_the_peak_memory_is_in_mebibytes(tmp_path, monkeypatch):
    module = import_recipe("my_memory", tmp_path, monkeypatch)
    memory = read(module.PeakMemory(), ToyRun(0.0))["peak_memory"]
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert memory == pytest.approx(int(peak) / 1024, rel=0.01)
