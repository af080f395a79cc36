"""Seeds and results: what travels between processes and must not change between versions."""

import pytest

from lit_dps.core.trial import (
    Cell,
    Status,
    Trial,
    TrialResult,
    check_names,
    check_sparsity,
    derive_seed,
    text_of,
)
from tests.support.errors import raises_about, refuses


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        # printf '0/init/0' | sha256sum | cut -c1-8, and so on: a change here makes every stored
        # study unrepeatable
        ((0, "init", 0), 3546334589),
        ((0, "init", 1), 3178985273),
        ((0, "order", 0), 1842012267),
        ((0, "prune", 0), 800012069),
        ((7, "init", 12), 3475897027),
        ((0, "init"), 707372002),
    ],
)
def test_seeds_are_the_ones_of_all_earlier_studies(arguments, seed):
    assert derive_seed(*arguments) == seed


def test_seeds_of_purposes_points_and_studies_differ():
    purposes = ("init", "order", "prune")
    seeds = {
        derive_seed(seed, purpose, i)
        for seed in range(10)
        for purpose in purposes
        for i in range(30)
    }
    assert len(seeds) == 900  # 900 draws of 2^32 collide with a chance of 1e-4, and these are fixed
    assert all(0 <= seed < 2**32 for seed in seeds)


STAGES = "0:B/4 2.5%:B/2 10%:B"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (0.1, "0.1"),
        (4, "4"),
        ("constant", "constant"),
        ("torch.optim.SGD", "SGD"),
        ("__main__.Net", "Net"),
        (STAGES, STAGES),
        ("a/b.pt", "a/b.pt"),
    ],
)
def test_only_class_paths_are_shortened(value, text):
    assert text_of(value) == text


def test_names_of_stored_studies_and_seeds_of_repeats_are_those_of_earlier_versions():
    cell = Cell(32, 0.0, (("batch.schedule", STAGES),))
    assert str(cell) == f"B=32 S=0 schedule={STAGES}"
    assert cell.stored_name == "B=32 S=0 schedule=5%:B/2 10%:B"
    seed = derive_seed(0, "init/B=32 S=0 schedule=5%:B/2 10%:B/repeat 1", 3)
    assert Trial(cell, 3, repeat=1).seed_for("init") == seed
    assert Trial(cell, 3).stored_name == f"{cell.stored_name} point 3"
    assert Trial(cell, 3, repeat=1).stored_name == f"{cell.stored_name} point 3 repeat 1"
    with refuses("study.grid.batch.schedule", STAGES):
        check_names("study.grid.batch.schedule", ["0:B/4 1.5%:B/2 10%:B", STAGES])


def test_the_cell_and_the_params_do_not_enter_the_seed():
    trials = [
        Trial(Cell(batch_size, sparsity), 3, {"model.learning_rate": rate}, seed=5)
        for batch_size in (2, 16_384)
        for sparsity in (0.0, 0.9)
        for rate in (0.1, 0.2)
    ]
    for purpose in ("init", "order", "prune"):
        assert {trial.seed_for(purpose) for trial in trials} == {derive_seed(5, purpose, 3)}


@pytest.mark.parametrize(
    ("status", "steps"),
    [
        (Status.COMPLETE, None),
        (Status.INCOMPLETE, 16),
        (Status.INFEASIBLE, 16),
        (Status.INFEASIBLE, 0),
    ],
)
def test_a_result_refuses_steps_that_do_not_go_with_its_status(status, steps):
    with raises_about(ValueError, steps, status):
        TrialResult(Trial(Cell(2, 0.0), 0), status, steps)


@pytest.mark.parametrize(
    ("status", "steps"),
    [(Status.COMPLETE, 16), (Status.INCOMPLETE, None), (Status.INFEASIBLE, None)],
)
def test_a_result_keeps_steps_that_do(status, steps):
    assert TrialResult(Trial(Cell(2, 0.0), 0), status, steps).steps == steps


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.0, 1.5, float("nan")])
def test_a_sparsity_outside_zero_to_one_is_refused(sparsity):
    with refuses("study.sparsities", sparsity):
        check_sparsity("study.sparsities", sparsity)


@pytest.mark.parametrize("sparsity", [0, 0.0, 0.5, 0.999])
def test_a_sparsity_from_zero_to_below_one_is_accepted(sparsity):
    check_sparsity("study.sparsities", sparsity)


def test_cells_sort_by_batch_size_and_print_short():
    cells = [Cell(16, 0.0), Cell(2, 0.9), Cell(2, 0.0)]
    assert [str(cell) for cell in sorted(cells)] == ["B=2 S=0", "B=2 S=0.9", "B=16 S=0"]
