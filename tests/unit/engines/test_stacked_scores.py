"""Pruning scores of the new runs of a stack, by one pass for all networks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import STACKED, Cell, Trial
from lit_dps.engines import stack_filler, stacked_scores
from lit_dps.engines.network_run import NetworkRun, build_trial
from lit_dps.engines.stacked_scores import scores_of_new_runs, scores_of_stack
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.pruning import pruner_of, top_k
from lit_dps.pruning.snip import Snip
from lit_dps.training import GoalErrorCallback
from tests.support.conformance import assert_conform
from tests.support.runs import train
from tests.support.setups import training_of
from tests.unit.engines.test_eligible import network
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, GOAL, trials, workload

RATES = [0.01, 0.03, 0.02]
# Sums over a few thousand examples in float32 differ by their order.
TOLERANCE = 1e-4


def prepared(settings: TrialSettings, asked: list[Trial]) -> list[NetworkRun]:
    runs = []
    for trial in asked:
        attempt = Attempt(trial, GoalErrorCallback(**GOAL).goal)
        built, device = build_trial(settings, trial)
        runs.append(NetworkRun.build_or_resume(attempt, built, settings, device))
    return runs


def scores_alone(run: NetworkRun, settings: TrialSettings) -> dict[str, torch.Tensor]:
    config = settings.resolve(run.attempt.trial).pruning
    with run.copy_to_prune(config, config.batch_size) as copy:
        return pruner_of(config.method, config.options).scores(copy, torch.Generator())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("snip", {}),
        ("snip", {"batches": 3}),
        ("snip", {"abs_per_batch": True}),
        ("grasp", {}),
        ("grasp", {"temperature": None}),
        ("grasp", {"per_class": 5}),
    ],
)
def test_each_network_has_the_scores_and_the_mask_of_its_own_pass(method, options):
    settings = training_of(workload(), GOAL, pruning={"method": method, "options": options})
    runs = prepared(settings, trials(Cell(16, 0.9), rates=RATES))
    before = [parameter.clone() for run in runs for parameter in run.module.parameters()]
    stacked = scores_of_stack(runs, settings)
    assert len(stacked) == len(runs)
    masks = []
    for run, scores in zip(runs, stacked, strict=True):
        expected = scores_alone(run, settings)
        assert list(scores) == list(expected)
        largest = max(float(score.abs().max()) for score in expected.values())
        for name, score in expected.items():
            assert torch.allclose(scores[name], score, rtol=TOLERANCE, atol=TOLERANCE * largest)
        flat = torch.cat([score.flatten() for score in expected.values()])
        mask = top_k(scores, 0.9)
        masks.append(mask)
        ours = torch.cat([keep.flatten() for keep in mask.values()])
        alone = torch.cat([keep.flatten() for keep in top_k(expected, 0.9).values()])
        stacked_flat = torch.cat([scores[name].flatten() for name in expected])
        rounding = (stacked_flat - flat).abs().max()
        is_tied = (flat - flat[alone].min()).abs() <= 2 * rounding
        assert torch.equal(ours[~is_tied], alone[~is_tied])
        assert int(is_tied.sum()) < len(flat) / 20
    assert not torch.equal(masks[0]["network.layers.1.weight"], masks[1]["network.layers.1.weight"])
    after = [parameter for run in runs for parameter in run.module.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Networks of a stack share a pass on the CPU too; the batch sizes of the passes."""
    on_cpu = partial(scores_of_new_runs, device_types=("cpu",))
    monkeypatch.setattr(stack_filler, "scores_of_new_runs", on_cpu)
    sizes = []
    original = Snip.scores

    def scores(pruner, network, generator):
        sizes.append(network.batch_size)
        return original(pruner, network, generator)

    monkeypatch.setattr(Snip, "scores", scores)
    return sizes


@pytest.mark.parametrize(("slots", "passes_of_stack"), [(16, 1), (4, 2)])
def test_a_stack_and_its_refills_take_one_pass_for_all_points(passes, slots, passes_of_stack):
    asked = trials(Cell(16, 0.0), Cell(16, 0.5), Cell(16, 0.9), rates=RATES)
    goal = {**GOAL, "error": 1e-6, "max_steps": 24}  # all runs end at the same step
    stacked = train(asked, workload(), goal, size=slots)
    assert passes == [100] * passes_of_stack
    assert {result.engine for result in stacked} == {STACKED}
    single = train(asked, workload(), goal, lean=False)
    assert assert_conform(stacked, single, Goal.from_dict(goal), EXAMPLES) == []


class HalfSnip(Snip):
    def scores(self, network, generator):
        return {name: score / 2 for name, score in super().scores(network, generator).items()}


@pytest.mark.parametrize(
    ("used", "cell", "pruning", "reason"),
    [
        (workload(), Cell(16, 0.0), {}, "no pruning"),
        (workload(), Cell(16, 0.5), {"method": "magnitude"}, "no pass"),
        (workload(), Cell(16, 0.5), {"method": f"{__name__}.HalfSnip"}, "own scores"),
        (workload(**network("Normalized")), Cell(16, 0.5), {}, "batch statistics"),
    ],
)
def test_other_runs_prune_alone(used, cell, pruning, reason):
    settings = training_of(used, GOAL, pruning=pruning)
    runs = prepared(settings, trials(cell, rates=RATES))
    assert scores_of_new_runs(runs, settings, ("cpu",)) == [None] * 3, reason


def test_a_cpu_and_a_network_alone_take_single_passes():
    settings = training_of(workload(), GOAL, pruning={})
    runs = prepared(settings, trials(Cell(16, 0.5), rates=RATES))
    assert scores_of_new_runs(runs, settings) == [None] * 3
    assert scores_of_new_runs(runs[:1], settings, ("cpu",)) == [None]
    # A point whose scores are stored needs no pass.
    runs[0].prune_unless_resumed(settings)
    first, *others = scores_of_new_runs(runs, settings, ("cpu",))
    assert first is None and None not in others


def test_too_little_memory_divides_the_pass_and_an_error_leaves_it_to_each_run(monkeypatch, capsys):
    settings = training_of(workload(), GOAL, pruning={})
    runs = prepared(settings, trials(Cell(16, 0.5), rates=[0.01 * i for i in range(1, 6)]))
    expected = scores_of_new_runs(runs, settings, ("cpu",))
    sizes = []

    def fits_two(networks, settings):
        sizes.append(len(networks))
        if len(networks) > 2:
            raise torch.OutOfMemoryError
        return scores_of_stack(networks, settings)

    monkeypatch.setattr(stacked_scores, "scores_of_stack", fits_two)
    scores = scores_of_new_runs(runs, settings, ("cpu",))
    assert sizes == [5, 2, 3]
    for ours, theirs in zip(scores[:2], expected[:2], strict=True):
        assert ours is not None and theirs is not None
        for name, score in theirs.items():
            assert torch.allclose(ours[name], score, rtol=1e-5)
    assert scores[2:] == [None] * 3

    def fails(networks, settings):
        raise KeyError("a name of the user")

    monkeypatch.setattr(stacked_scores, "scores_of_stack", fails)
    monkeypatch.setattr(stacked_scores, "_reported", set())
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert scores_of_new_runs(runs, settings, ("cpu",)) == [None] * 5
    line = (
        "each network makes its own scoring pass, because a pass for all networks fails: KeyError: "
    )
    assert capsys.readouterr().err == f"{line}'a name of the user'\n"
