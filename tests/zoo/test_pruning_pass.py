"""The pass over the training split that scores the weights leaves no trace, and is made once for
each point."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.zoo.animals.data import clouds
from tests.zoo.animals.models import Net
from tests.zoo.animals.passes import Spy
from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

NEVER = {"monitor": "val_loss", "error": 1e-6, "max_steps": 10}
STATEFUL = ["passes.MovingTeacher", "passes.NumpyNoise"]
MORE = ["passes.WarmUp", "parts.BatchNorm", "passes.Memory", "passes.LateBuffer", "passes.Dropout"]


@pytest.mark.parametrize(
    "model", [*STATEFUL, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]
)
def test_training_begins_as_if_there_had_been_no_pass(zoo, model):
    copies = {"teacher.": "student."} if "Teacher" in model else {}
    outcome = zoo(model, goal=NEVER, copies=copies)
    assert_works(outcome)
    starts = {result.trial.cell: outcome.audit(result) for result in outcome.results}
    for batch_size in (8, 32):
        dense, sparse = (starts[cell] for cell in sorted(starts) if cell.batch_size == batch_size)
        assert_same_start(dense, sparse, copies)


def assert_same_start(dense, sparse, copies) -> None:
    assert dense.start.tensors.keys() == sparse.start.tensors.keys()
    for name, tensor in dense.start.tensors.items():
        original = next((o + name[len(c) :] for c, o in copies.items() if name.startswith(c)), name)
        keep = sparse.mask.get(original, torch.tensor(True))
        assert torch.equal(torch.where(keep, tensor, 0), sparse.start.tensors[name]), name
    assert dense.start.plain == sparse.start.plain
    assert dense.start.generators == sparse.start.generators
    assert all(map(torch.equal, dense.start.batch, sparse.start.batch))


# Masks with drop_last have a test below.
@pytest.mark.parametrize("drop_last", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_pass_is_over_all_examples_and_once_for_each_point(zoo, drop_last):
    Spy.calls.clear()
    data = spec("data.Clouds", n=170, drop_last=drop_last)
    outcome = zoo(
        "passes.Spy", data, goal=NEVER, sparsities=[0.0, 0.5, 0.8], trials=2, noise_scale=False
    )
    assert_works(outcome)
    sizes = Counter(map(len, Spy.calls))
    if drop_last:  # batches of even, nearly equal sizes: 85 pairs in 4 batches
        common, seldom = 42, 44
        assert sizes.keys() == {8, 32, common, seldom}
    else:
        common, seldom = 50, 20
        assert sizes.keys() - {2, 10} == {8, 32, common, seldom}
    # Two passes, and the first and the last batch in each of four dry runs: at both batch sizes,
    # and two for the resume, an unbroken one and one that is interrupted and pruned no more.
    assert (sizes[common], sizes[seldom]) == (2 * 3 + 4, 2 * 1 + 4)
    seen = {first for call in Spy.calls if len(call) in (common, seldom) for first in call}
    assert len(seen) == 170
    trained = sum(len(outcome.audit(result).rates) for result in outcome.results)
    assert trained == 12 * NEVER["max_steps"] <= sum(sizes.values())


def test_the_mask_is_that_of_the_whole_split_at_any_batch_size(zoo):
    outcome = zoo(
        data=spec("data.Clouds", n=170, drop_last=True), goal=NEVER, pruning={"batch_size": 30}
    )
    assert_works(outcome)
    audits = {result.trial.cell: outcome.audit(result) for result in outcome.results}
    masks = [audits[cell].mask for cell in sorted(audits) if cell.sparsity]
    assert all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0])
    dense = next(audits[cell] for cell in sorted(audits) if not cell.sparsity)
    scores = saliency({name: tensor.cpu() for name, tensor in dense.start.tensors.items()})
    masks = [{name: keep.cpu() for name, keep in mask.items()} for mask in masks]
    left = torch.cat([scores[name][keep] for name, keep in masks[0].items()])
    gone = torch.cat([scores[name][~keep] for name, keep in masks[0].items()])
    assert len(left) == round(0.2 * (len(left) + len(gone)))
    assert left.min() >= gone.max() * (1 - 1e-4)


def test_an_error_that_training_without_the_pass_has_too_is_reported_as_the_modules(zoo):
    outcome = zoo("passes.Misspelt", goal=NEVER, sparsities=[0.8])
    assert_refused(
        outcome, "dry run of B=8 S=0", "no_such_attribute", r"passes.py, line \d+, in training_step"
    )
    assert "pruning.method" not in outcome.err


def saliency(weights) -> dict[str, torch.Tensor]:
    """|w * dL/dw| of the mean loss over all of the training split."""
    net, (x, y) = Net(), clouds(170, 1).tensors
    net.load_state_dict(weights)
    net.loss((x, y)).backward()
    return {name: (p * p.grad).detach().abs() for name, p in net.named_parameters()}
