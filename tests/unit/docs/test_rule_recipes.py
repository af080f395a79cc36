"""The update rules of docs/extending.md: their values, stacked, and resumed after a kill."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import _muon

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status
from lit_dps.optim import RULES
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.conformance import assert_conform
from tests.support.recipes import MAX_LINES, files_of_page, import_recipe
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_lockstep import EXAMPLES, GOAL, trials, workload

RULES_OF_PAGE = {"my_rule": "SIGN", "my_lion": "LION", "my_muon": "MUON"}
NUMBERS = {"momentum": 0.9, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1}
RATE = 0.03


@pytest.fixture(params=RULES_OF_PAGE)
def rule(request, tmp_path, monkeypatch):
    """A rule of the page, known to lit_dps by its class path."""
    (tmp_path / "page").mkdir()
    module = import_recipe(request.param, tmp_path / "page", monkeypatch)
    found = getattr(module, RULES_OF_PAGE[request.param])
    monkeypatch.setitem(RULES, f"{request.param}.{RULES_OF_PAGE[request.param]}", found)
    return found


def test_each_file_of_the_page_is_short():
    for name, text in files_of_page().items():
        assert len(text.splitlines()) < MAX_LINES, name


def test_the_plug_ins_of_the_page_conform(tmp_path, monkeypatch):
    import_recipe("test_mine", tmp_path, monkeypatch).test_mine_conform()


def train_with(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        shape = parameter.shape
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def parameter(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_muon_is_that_of_torch(shape, tmp_path, monkeypatch):
    rule = import_recipe("my_muon", tmp_path, monkeypatch).MUON
    ours, theirs, rounded = parameter(*shape), parameter(*shape), parameter(*shape)
    train_with(rule.make([ours], RATE, NUMBERS), ours)
    train_with(torch.optim.Muon([rounded], RATE, weight_decay=0.1, momentum=0.9), rounded)
    # Torch's own code, in double precision in place of bfloat16.
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    exact: dict = {"torch": torch, "Tensor": torch.Tensor}
    exec(source.replace("torch.bfloat16", "torch.float64"), exact)
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", exact["_zeropower_via_newtonschulz"])
    train_with(torch.optim.Muon([theirs], RATE, weight_decay=0.1, momentum=0.9), theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # Six steps of rate 0.03, each rounded to 8 bits.
    torch.testing.assert_close(ours, rounded, rtol=0, atol=6 * RATE * 2**-6)


def test_muon_takes_a_filter_as_a_row_and_a_bias_as_a_column(tmp_path, monkeypatch):
    rule = import_recipe("my_muon", tmp_path, monkeypatch).MUON
    filters, matrix = parameter(4, 2, 3, 3), parameter(4, 18)
    bias, column = parameter(4), parameter(4, 1)
    for ours, theirs in ((filters, matrix), (bias, column)):
        train_with(rule.make([ours], RATE, NUMBERS), ours)
        train_with(rule.make([theirs], RATE, NUMBERS), theirs)
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=1e-12, atol=1e-12)


def test_lion_and_sign_by_hand(tmp_path, monkeypatch):
    lion = import_recipe("my_lion", tmp_path, monkeypatch).LION
    sign = import_recipe("my_rule", tmp_path, monkeypatch).SIGN
    for rule in (lion, sign):
        ours, generator = parameter(7), torch.Generator().manual_seed(1)
        weights, average = ours.detach().clone(), torch.zeros(7, dtype=torch.float64)
        train_with(rule.make([ours], RATE, NUMBERS), ours)
        for _ in range(6):
            gradient = torch.randn(7, generator=generator, dtype=torch.float64)
            if rule is lion:
                step = torch.sign(0.8 * average + 0.2 * gradient)
                weights = weights - RATE * (step + 0.1 * weights)
                average = 0.95 * average + 0.05 * gradient
            else:
                average = 0.9 * average + gradient
                weights = weights - RATE * torch.sign(average)
        torch.testing.assert_close(ours.detach(), weights, rtol=1e-12, atol=1e-12)


def asked(rule):
    rates = {"muon": [0.02, 0.01, 0.005]}.get(rule.name, [0.001, 0.0005, 0.002])
    return trials(Cell(16, 0.8), rates=rates)


def of_rule(rule):
    (name,) = (key for key, value in RULES.items() if value is rule)
    return workload(optimizer=name, weight_decay=0.01, schedule="linear", decay_steps=60)


def test_it_trains_alike_alone_stacked_and_in_lightnings_loop(rule):
    goal = {**GOAL, "max_steps": 24}
    alone = train(asked(rule), of_rule(rule), goal)
    lightning = train(asked(rule), of_rule(rule), goal, lean=False)
    stacked = train(asked(rule), of_rule(rule), goal, size=2)
    assert {result.engine for result in stacked} == {"stacked"}
    assert [r.curve for r in alone] == [r.curve for r in lightning]
    assert assert_conform(stacked, alone, Goal.from_dict(goal), EXAMPLES) == []
    errors = [min(result.curve["val_error"]) for result in alone]
    assert min(errors) < 0.7, "it learns: the untrained network has an error of 0.9"


class Killed(BaseException):
    """Ends the process at a check."""


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_is_killed_and_resumed_equals_an_unbroken_one(rule, size, tmp_path):
    goal = {**GOAL, "max_steps": 24}
    unbroken = train(asked(rule)[:2], of_rule(rule), goal, size=size)
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    calls = []

    def kill() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Killed

    with pytest.raises(Killed):
        train(
            asked(rule)[:2], of_rule(rule), goal, size=size, checkpoints=checkpoints, at_check=kill
        )
    assert list(tmp_path.rglob("*.ckpt")) or list(tmp_path.rglob("*.pt"))
    reports = []
    checkpoints = Checkpoints(tmp_path, "study", 60, reports.append)
    resumed = train(asked(rule)[:2], of_rule(rule), goal, size=size, checkpoints=checkpoints)
    assert any("resumes from step" in report for report in reports)
    assert [replace(r, seconds=0.0) for r in resumed] == [replace(r, seconds=0.0) for r in unbroken]
    assert {r.status for r in resumed} <= {Status.COMPLETE, Status.INCOMPLETE}
