"""B is the number of examples of an optimizer step, whatever makes the batches."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

NEVER = {"monitor": "val_loss", "error": 1e-6}


def test_batches_are_accumulated_to_the_batch_size(zoo):
    outcome = zoo(trainer={"accumulate_grad_batches": 4})
    assert_works(outcome)
    for result in outcome.results:
        assert len(outcome.audit(result).start.batch[0]) == result.trial.cell.batch_size // 4


def test_a_batch_size_that_cannot_be_accumulated(zoo):
    refused = zoo(trainer={"accumulate_grad_batches": 4}, batch_sizes=[6, 32])
    assert_refused(refused, r"study\.batch_sizes", "6", "accumulate_grad_batches")


def test_an_accumulation_that_changes(zoo):
    scheduler = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
    callbacks = [{"class_path": scheduler, "init_args": {"scheduling": {2: 4}}}]
    assert_refused(zoo(trainer={"callbacks": callbacks}), "GradientAccumulationScheduler")


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_above_the_training_split(zoo, drop_last):
    refused = zoo(data=spec("data.Clouds", drop_last=drop_last), batch_sizes=[8, 1024])
    assert_refused(refused, r"study\.batch_sizes", "1024", "160")


def test_a_batch_size_of_the_whole_training_split(zoo):
    assert_works(zoo(data=spec("data.Clouds", drop_last=True), batch_sizes=[160]))


def test_a_batch_size_key_that_feeds_no_loader(zoo):
    refused = zoo(data="data.Deaf", batch_size_key="data.batch", batch_sizes=[8, 32])
    assert_refused(refused, r"study\.batch_size_key", r"data\.batch", "16")


def test_short_last_batches_are_counted_and_told(zoo):
    outcome = zoo(data=spec("data.Clouds", n=170), goal=NEVER)
    assert_works(outcome, ["incomplete"])
    short = {
        result.trial.cell.batch_size: result.flags["short_steps"] for result in outcome.results
    }
    assert short == {8: 1, 32: 6}  # of 40 steps: one epoch of 22, six of 6
    notes = [line for line in outcome.out.splitlines() if line.startswith("note: ")]
    assert any("fewer than B examples" in note for note in notes), notes


@pytest.mark.long
def test_full_batches_alone_are_not_told(zoo):
    outcome = zoo(data=spec("data.Clouds", n=170, drop_last=True), goal=NEVER)
    assert_works(outcome, ["incomplete"])
    assert not any("short_steps" in result.flags for result in outcome.results)
    assert "fewer than B examples" not in outcome.out


def test_a_validation_that_drops_examples(zoo):
    assert_refused(zoo(data="data.CroppedValidation"), "validation", "drop_last|40")


def test_a_validation_that_depends_on_the_batch_size(zoo):
    assert_refused(
        zoo(data="data.ValidationByBatchSize"), "validation", "batch size|batch_size", "8", "32"
    )


def test_an_empty_validation(zoo):
    assert_refused(zoo(data="data.NoValidation"), "validation")
