"""The bare loop of the section "stacked", and its tables."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.bare_stack import (
    BF16,
    FLOPS_PER_EXAMPLE,
    GROUPS,
    PRODUCTS,
    BareStack,
    Variant,
    bare_rate,
)
from benchmarks.numbers import Sample
from benchmarks.setups import MOMENTUM_CONFIG, paper_setup
from benchmarks.stacked import Case, _pace, best_float32_rate, show
from benchmarks.stacked_tables import BareRow, EngineRow, StackedReport, StudyRun
from benchmarks.step import threads
from benchmarks.stranger import BARE, FIT, GPT, LIGHTNING, StrangerSteps
from lit_dps.models import SimpleCNN


@pytest.mark.parametrize("convolutions", [PRODUCTS, GROUPS])
def test_the_bare_loop_trains_simple_cnn_with_momentum_and_masks(convolutions):
    stack = BareStack(2, 3, "cpu", Variant(convolutions))
    stack.index.random_(100)
    network = SimpleCNN()
    with torch.no_grad():
        leaves = stack.leaves.values()
        for parameter, leaf in zip(network.parameters(), leaves, strict=True):
            parameter.copy_(leaf[1])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    sizes = [parameter.numel() for parameter in network.parameters()]
    masks = stack.keep[1, : sum(sizes)].split(sizes)
    for batch in stack.index[:3]:
        images, labels = stack.images[batch[1]], stack.labels[batch[1]]
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        for parameter, mask in zip(network.parameters(), masks, strict=True):
            parameter.grad.mul_(mask.view_as(parameter))
        optimizer.step()
        stack.step(batch)
    expected = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    torch.testing.assert_close(stack.weights[1, : sum(sizes)], expected, rtol=1e-4, atol=1e-6)


def test_the_bare_loop_has_a_rate_in_every_precision():
    with threads(1):
        for variant in (Variant(PRODUCTS), Variant(GROUPS, BF16)):
            assert bare_rate(2, 2, "cpu", variant, seconds=0.0) > 0


def test_the_arithmetic_of_a_step_is_that_of_its_layers():
    assert FLOPS_PER_EXAMPLE == 21_565_440


@pytest.mark.parametrize("networks", [1, 2])
def test_the_engine_has_a_pace(networks):
    setup = paper_setup(True, MOMENTUM_CONFIG)
    with threads(1):
        pace = _pace(setup, Case(networks, 2, 4), 4, 1e-6, 2, "cpu")
    assert pace.rate > 0 and pace.setup_seconds > 0


def test_the_gpt_has_the_parameters_of_its_report():
    assert sum(parameter.numel() for parameter in GPT().parameters()) == 10_893_312


def test_the_fastest_bare_loop_in_full_float32_is_the_baseline():
    rates = {"a, float32": 3.0, "b, float32": math.nan, "c, graph, float32": 4.0, "d, TF32": 5.0}
    assert best_float32_rate(BareRow(100, 16, rates)) == 4.0


def test_tables_show_rates_shares_and_ratios():
    one = Sample((0.010,))
    text = show(
        StackedReport(
            "cuda",
            "MNIST",
            16,
            (BareRow(100, 16, {"products, eager, float32": 28_800.0}, {}),),
            (EngineRow(100, 16, 0.075, 14_400.0, 0.5, {"early checks": 7_200.0}),),
            StudyRun(
                16, 100, 0.0, 60.0, 50.0, 62, {"stacked": 62}, 900, 100, 1_300, 20.0, 0.1, 0.2
            ),
            StrangerSteps(
                10,
                128,
                "bf16-mixed",
                100,
                {BARE: one, LIGHTNING: one, FIT: Sample((0.011,))},
                {LIGHTNING: Sample((1.0,)), FIT: Sample((1.1,))},
            ),
        )
    )
    lines = text.splitlines()
    assert "| 100 | 16 | 28,800 |" in lines
    assert "| 100 | 16 | 75.0 ms | 14,400 | x0.500 | 7,200 |  |" in lines
    assert f"| {FIT} | 11.0 ms | x1.10 |" in lines
    assert "**20 network-steps/s**" in text
