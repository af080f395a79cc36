"""Animals in other processes: two workers give the results of one to the bit, two ranks those but
for rounding."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from lit_dps.core.exit_codes import ExitCode
from lit_dps.storage.read import read_study
from tests.e2e.commands import run
from tests.zoo.run import Outcome, spec
from tests.zoo.verify import assert_works

NEVER = {"goal": {"monitor": "val_loss", "error": 1e-6, "max_steps": 20}}
ANIMALS = {
    "a teacher": {"model": "optimizers.Teacher"},
    "a loader with a worker": {"data": spec("data.Clouds", workers=1)},
    "numpy": {"data": "data.Noisy"},
    "short batches": {"data": spec("data.Clouds", n=170)},
}


def again(outcome: Outcome, *options: object) -> list:
    """The results of the same study by a command of its own, in a folder of its own, with more
    options."""
    folder = outcome.folder / "again"
    folder.mkdir()
    config = yaml.safe_load((outcome.folder / "zoo.yaml").read_text())
    (folder / "zoo.yaml").write_text(yaml.safe_dump(config))
    done = run(folder, "study", "--config", "zoo.yaml", *options)
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    record = read_study(f"sqlite:///{folder}/mlruns/study.db", "zoo")
    return [
        dataclasses.replace(r, seconds=0.0) for cell in record.cells for r in record.results[cell]
    ]


@pytest.mark.long  # tests/e2e/test_racing.py compares two workers with one
@pytest.mark.parametrize("animal", ["numpy", "short batches", "a loader with a worker"])
def test_two_workers_do_what_one_does(zoo, animal):
    outcome = zoo(**ANIMALS[animal], **NEVER)
    assert_works(outcome, ["incomplete"])
    assert again(outcome, "--study.workers", 2) == [
        dataclasses.replace(r, seconds=0.0) for r in outcome.results
    ]


@pytest.mark.long  # tests/e2e/test_ddp.py compares two ranks with one process
@pytest.mark.parametrize("animal", ["a teacher", "a loader with a worker"])
def test_two_ranks_do_what_one_process_does(zoo, animal):
    outcome = zoo(**ANIMALS[animal], **NEVER)
    assert_works(outcome, ["incomplete"])
    together = again(outcome, "--trainer.devices", 2, "--trainer.strategy", "ddp")
    assert len(together) == len(outcome.results) == 4
    for one, other in zip(outcome.results, together, strict=True):
        assert (other.status, other.kept, other.curve["step"]) == (
            one.status,
            one.kept,
            one.curve["step"],
        )
        assert other.curve["val_error"] == pytest.approx(one.curve["val_error"], rel=1e-3)
        assert other.flags == {
            "ranks": 2,
            **{k: v for k, v in one.flags.items() if k != "short_steps"},
        }
