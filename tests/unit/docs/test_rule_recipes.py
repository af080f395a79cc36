"""Rules that torch lacks, of docs/extending.md and by name: stacked, masked, resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status
from lit_dps.optim import RULES
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.conformance import assert_conform
from tests.support.recipes import MAX_LINES, files_of_page, import_recipe
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, trials, workload

RULES_OF_PAGE = {"my_rule": "SIGN", "my_lars": "LARS"}
NAMED_RULES = (
    *("lion", "muon", "soap"),
    *("schedule_free_sgd", "schedule_free_adamw"),
)


@pytest.fixture(params=[*RULES_OF_PAGE, *NAMED_RULES])
def rule(request, tmp_path, monkeypatch):
    """A rule of the page, known to lit_dps by its class path, or a rule with a name."""
    if request.param in NAMED_RULES:
        return RULES[request.param]
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


def test_lars_by_hand(tmp_path, monkeypatch):
    lars = import_recipe("my_lars", tmp_path, monkeypatch).LARS
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    ours, buffer = nn.Parameter(weights.clone()), torch.zeros(4, 3)
    optimizer = lars.make([ours], 0.03, {"momentum": 0.9})
    for _ in range(6):
        ours.grad = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        buffer = 0.9 * buffer + 0.03 * 0.1 * weights.norm() / ours.grad.norm() * ours.grad
        weights = weights - buffer
        optimizer.step()
    torch.testing.assert_close(ours.detach(), weights, rtol=1e-12, atol=1e-12)


def asked(rule):
    rates = {
        "lars": [0.3, 0.1, 0.2],
        "muon": [0.02, 0.01, 0.005],
        "soap": [0.01, 0.005, 0.003],
        "schedule_free_sgd": [0.5, 0.3, 0.2],
        "schedule_free_adamw": [0.01, 0.005, 0.003],
    }.get(rule.name, [0.001, 0.0005, 0.002])
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
            asked(rule)[:2],
            of_rule(rule),
            goal,
            size=size,
            checkpoints=checkpoints,
            raise_if_stopped=kill,
        )
    assert list(tmp_path.rglob("*.ckpt")) or list(tmp_path.rglob("*.pt"))
    reports = []
    checkpoints = Checkpoints(tmp_path, "study", 60, reports.append)
    resumed = train(asked(rule)[:2], of_rule(rule), goal, size=size, checkpoints=checkpoints)
    assert any("resumes from step" in report for report in reports)
    assert [replace(r, seconds=0.0) for r in resumed] == [replace(r, seconds=0.0) for r in unbroken]
    assert {r.status for r in resumed} <= {Status.COMPLETE, Status.INCOMPLETE}
