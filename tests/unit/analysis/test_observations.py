"""The notes on what was observed while the trials ran; their wording is in tests/golden."""

import dataclasses
import math
import re

import optuna
import pytest
import torch

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import AT_MOST, observations_of_cells
from lit_dps.analysis.other_goals import at_goal
from lit_dps.core.racing import cut_at_step
from lit_dps.core.trial import (
    BY_NODES,
    BY_WEIGHTS,
    CHANGE_EVERY,
    KEPT,
    PRUNABLE,
    SHORT_STEPS,
    STACKED,
    TRAINED,
    UNCOUNTED_STEPS,
    UNSCORED,
    Cell,
)
from lit_dps.pruning import Mask, Pruner, mask_flags
from lit_dps.pruning.moving import RigL
from lit_dps.report.notes import lines_of
from lit_dps.report.pruning_notes import PRUNING
from lit_dps.report.text import render
from lit_dps.report.trial_notes import ENGINES, FAILURES
from lit_dps.report.warnings import study_notes
from lit_dps.storage.read import read_study
from tests.support.fake_study import result, write_study
from tests.support.texts import numbers_in

DENSE, SPARSE = Cell(8, 0.0), Cell(8, 0.9)


def read(*results, **kw):
    """A study of two cells with these results."""
    storage = optuna.storages.InMemoryStorage()
    cells = {cell: [r for r in results if r.trial.cell == cell] for cell in (DENSE, SPARSE)}
    write_study(storage, cells, space={}, **kw)
    return read_study(storage, "fake")


def trial(point, steps=320, cell=DENSE, status="complete", failure="", **observed):
    return result(
        cell,
        point,
        steps if status == "complete" else None,
        status,
        failure=failure,
        flags=observed,
    )


def observed_notes(record):
    """Return the notes on what happened in the trials of a study."""
    return lines_of((*FAILURES, *PRUNING, *ENGINES), Analysis(record))


def test_nothing_observed_is_no_line():
    assert observed_notes(read(trial(0), trial(1, None, status="incomplete"))) == []
    assert observed_notes(read()) == []


def test_short_steps():
    steps = {SHORT_STEPS: 20}
    # 20 of 320 steps are 6.25 %, 20 of 160 are 12.5 %
    (note,) = observed_notes(read(trial(0, **steps), trial(1, 160, **steps), trial(2)))
    assert numbers_in(note) == [2, 3, 12.5]


def test_steps_whose_examples_are_not_known():
    (note,) = observed_notes(read(trial(0, **{UNCOUNTED_STEPS: 20}), trial(1)))
    assert numbers_in(note) == [1, 2, 6.25]


def test_short_steps_of_a_trial_that_counts_to_an_earlier_step_are_as_many_of_its_steps():
    curve = {"step": [16, 32, 48, 64], "val_error": [0.4, 0.3, 0.2, 0.1], "train_loss": [1.0] * 4}
    long = result(DENSE, 0, 64, curve=curve, flags={SHORT_STEPS: 8, STACKED: 1})
    assert cut_at_step(long, 32).flags == {SHORT_STEPS: 4, STACKED: 1}
    at = at_goal(read(long, goals=[0.3]), 0.3)
    assert numbers_in(observed_notes(at)[0]) == [1, 1, 12.5]
    plain = dataclasses.replace(long, flags={STACKED: 1})
    assert cut_at_step(plain, 32).flags == {STACKED: 1}


def test_weights_kept_without_a_score():
    half = Cell(8, 0.5)
    storage = optuna.storages.InMemoryStorage()
    cells = {
        half: [trial(0, cell=half, **{UNSCORED: 7, KEPT: 50})],
        SPARSE: [
            trial(i, cell=SPARSE, **{UNSCORED: n, KEPT: 74316})
            for i, n in enumerate((12, 36818, 5))
        ],
    }
    write_study(storage, cells, space={})
    (note,) = observed_notes(read_study(storage, "fake"))
    assert numbers_in(note)[-4:] == [7, 50, 36818, 74316]
    assert note.index("S=0.5") < note.index("S=0.9")


def test_masks_that_did_not_change_before_the_goal():
    """A trial of K < every has the mask of its start. Trials without a goal do not count."""
    every = {CHANGE_EVERY: 100}
    early = [trial(i, steps, SPARSE, **every) for i, steps in enumerate((80, 96, 112))]
    missed = trial(3, None, SPARSE, "incomplete", **every)
    (note,) = observed_notes(read(*early, missed, trial(0, 16)))
    assert "S=0.9: 2 of 3 trials" in note and "after 100 steps" in note
    assert observed_notes(read(trial(0, 100, SPARSE, **every))) == []
    mask = Mask({"w": torch.tensor([True, False])})
    assert mask_flags(mask, RigL(every=7), 2) == {CHANGE_EVERY: 7}


def test_a_note_on_pruned_nodes_has_the_shares_of_weights_that_remain():
    by_nodes = [trial(i, cell=SPARSE, **{BY_NODES: 1}) for i in range(2)]
    kept = ({"a.w": (10, 100), "b.w": (5, 100)}, {"a.w": (20, 100), "b.w": (1, 100)})
    found = [dataclasses.replace(r, kept=k) for r, k in zip(by_nodes, kept, strict=True)]
    (note,) = observed_notes(read(*found, trial(0)))
    assert "nodes" in note and "S=0.9" in note and numbers_in(note) == [7.5, 10.5]


def test_a_method_that_keeps_roughly_a_share_is_no_count_of_nodes():
    units = {BY_WEIGHTS: {"a.w": (12, 100)}, "by_channels": {"a.w": (25, 100)}}
    found = [
        dataclasses.replace(trial(i, cell=SPARSE, **{unit: 1}), kept=kept)
        for i, (unit, kept) in enumerate(units.items())
    ]
    channels, weights = observed_notes(read(*found))
    assert "channels" in channels and "S=0.9" in channels and "S=0.9" in weights
    assert numbers_in(channels)[-2:] == [25, 25] and numbers_in(weights)[-2:] == [12, 12]


@pytest.mark.parametrize(
    ("counts", "unit"), [(None, BY_WEIGHTS), ("nodes", BY_NODES), ("whole rows", "by_whole_rows")]
)
def test_a_pruner_says_what_a_sparsity_counts(counts, unit):
    class Roughly(Pruner):
        hits_count = False

        def mask(self, network, sparsity, generator):
            raise AssertionError

    if counts:
        Roughly.counts = counts
    assert mask_flags(Mask({"w": torch.tensor([True, False])}), Roughly(), 2) == {unit: 1}


def test_few_prunable_weights():
    names = ("head.w", "body.w", "body.b", "x.w", "x.b")
    few = [
        trial(i, cell=SPARSE, **{PRUNABLE: n, TRAINED: 456}) for i, n in enumerate((200, 123, 150))
    ]
    few[1] = dataclasses.replace(few[1], kept=dict.fromkeys(names, (1, 10)))
    (note,) = observed_notes(read(*few))
    assert numbers_in(note) == [123, 456, 27, 2]
    assert note.index("head.w") < note.index("body.w") < note.index("body.b")


def test_stopped_trials_and_why_the_first_was():
    one = trial(3, status="stopped", failure="EarlyStopping: no improvement")
    other = trial(0, cell=SPARSE, status="stopped", failure="something else")
    for count, record in ((2, read(other, one)), (1, read(one))):
        (note,) = observed_notes(record)
        assert numbers_in(note) == [count]
        assert note.endswith(one.failure)


def failed(point, cell=DENSE):
    return trial(point, cell=cell, status="failed", failure=f"ValueError: of point {point}")


@pytest.mark.parametrize("failures", [7, 4])
def test_k_star_of_few_trials_without_failure_is_an_upper_bound(failures):
    complete = [trial(point, 320 + 32 * point) for point in range(8 - failures)]
    failed_trials = [failed(point) for point in range(8 - failures, 8)]
    analysis = Analysis(read(*complete, *failed_trials, trials=8))
    is_bound = failures > 4
    cell = analysis.by_cell[DENSE]
    assert (cell.k_star, cell.is_upper_bound) == (320, is_bound)
    (observation,) = observations_of_cells(analysis.record, [cell])
    assert (observation.k, observation.bound) == (320, AT_MOST if is_bound else 0)
    floors = analysis.table.set_index("sparsity")["floor"]
    assert floors[0.0] == is_bound


def test_failed_trials_are_listed():
    (note,) = observed_notes(read(failed(3)))
    assert numbers_in(note) == [1, 3, 3]
    (note,) = observed_notes(read(failed(3), failed(7, SPARSE)))
    assert numbers_in(note) == [2, 3, 3, 7, 7]
    assert f"{DENSE} " in note and f"{SPARSE} " in note and failed(7).failure in note


def test_of_many_failed_trials_three_are_listed():
    (note,) = observed_notes(read(*map(failed, range(5))))
    assert numbers_in(note) == [5, 0, 0, 1, 1, 2, 2, 2] and "2 more" in note
    three = observed_notes(read(*map(failed, range(3))))[0]
    assert "more" not in three


@pytest.mark.parametrize("failure", ["", "\n"])
def test_a_failure_without_a_reason_is_still_a_line(failure):
    (line,) = observed_notes(read(trial(0, status="stopped", failure=failure)))
    assert line.rpartition(": ")[2]


def test_the_lines_are_notes_below_the_table():
    record = read(trial(0, **{SHORT_STEPS: 20}), failed(1))
    lines = observed_notes(record)
    assert len(lines) == 2
    assert [line for line in study_notes(Analysis(record)) if line in lines] == lines
    assert all(f"note: {line}\n" in render(Analysis(record)) for line in lines)


def test_a_note_lists_several_versions_of_pytorch():
    def torch_notes(*versions):
        environments = tuple({"python": "3.11", "version.torch": version} for version in versions)
        record = read(trial(0))
        record = dataclasses.replace(record, environments=({"python": "3.9"}, *environments))
        return [line for line in study_notes(Analysis(record)) if "torch" in line]

    assert torch_notes() == torch_notes("2.15.0", "2.15.0") == []
    (note,) = torch_notes("2.15.0", "2.11.0", "2.15.0")
    assert re.findall(r"2\.1\d\.0", note) == ["2.15.0", "2.11.0"]


def of_values(point, values, status, steps=None):
    """A trial whose checks every 16 steps found these values, with a finite loss."""
    at = [16 * (i + 1) for i in range(len(values))]
    curve = {"step": at, "val_error": list(values), "train_loss": [1.0] * len(values)}
    return result(DENSE, point, steps, status, curve=curve)


def test_checks_without_a_finite_value_are_counted_by_trial():
    found = [
        of_values(0, [math.nan, math.nan, 0.05], "complete", 48),
        of_values(1, [math.nan, 0.5], "incomplete"),
        of_values(2, [0.5, math.inf], "incomplete"),
        of_values(3, [0.5, math.nan], "infeasible"),
    ]
    (note,) = observed_notes(read(*found))
    assert note.startswith("val_error ") and numbers_in(note) == [2, 1]


def test_the_last_value_of_a_trial_that_diverged_is_no_missing_value():
    assert observed_notes(read(of_values(0, [math.nan], "infeasible"))) == []
