"""A grid by configuration key: which values it takes, what its cells train, and what a study of it
is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lit_dps.core.attempt import Attempt
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.environment import Environment
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import Cell, Series, Trial
from lit_dps.models import MLP, SimpleCNN
from lit_dps.study.setup import StudySetup
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.runs import train
from tests.support.setups import check, setup_of
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401

SPACE = {"model.learning_rate": Range(1e-3, 1.0, "log")}
METHOD = {"pruning.method": ["snip", "random"]}
NETWORK = {"model.network": ["lit_dps.models.MLP", "lit_dps.models.SimpleCNN"]}


def setup(grid: dict, model: dict = MODEL, **study) -> StudySetup:
    config = StudyConfig(grid=grid, space=SPACE, trials=1, **study)
    pruning = {"method": "snip", "biases": "paper", "batch_size": 100}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    return setup_of(config, StorageConfig(), workload, GOAL, pruning, {"interval": None})


def test_batch_sizes_and_sparsities_may_stand_in_the_grid():
    long = StudyConfig(grid={"data.batch_size": [2.0, 4], "pruning.sparsity": [0, 0.5]})
    short = StudyConfig(batch_sizes=[2, 4], sparsities=[0.0, 0.5])
    assert long.cells == short.cells == [Cell(b, s) for s in (0.0, 0.5) for b in (2, 4)]
    assert long.axes == {} and [str(cell) for cell in long.cells][:1] == ["B=2 S=0"]
    with refuses("study.grid", "data.batch_size"):
        StudyConfig(grid={"data.batch_size": [2]}, batch_sizes=[4])


@pytest.mark.parametrize("value", [True, None, "8", [8]])
@pytest.mark.parametrize("key", ["data.batch_size", "pruning.sparsity"])
def test_batch_sizes_and_sparsities_of_the_grid_are_numbers(key, value):
    with pytest.raises(ConfigError) as error:
        StudyConfig(grid={key: [value]})
    assert (error.value.key, error.value.value) == (f"study.grid.{key}", value)


def test_true_and_false_are_values_of_an_axis():
    config = StudyConfig(
        batch_sizes=[2], sparsities=[0.5], grid={"model.norm": [True, False]}, space=SPACE
    )
    config.check()
    assert [str(cell).rpartition(" ")[2] for cell in config.cells] == ["norm=false", "norm=true"]


@pytest.mark.parametrize(
    "values", [[True, 0], [True, "snip"], [None, 1], [[1], [2]], [{"class_path": "a.B"}]]
)
def test_a_refused_value_of_an_axis_comes_with_its_key(values):
    with pytest.raises(ConfigError) as error:
        StudyConfig(grid={"model.norm": values}, space=SPACE).check()
    assert error.value.key == "study.grid.model.norm"
    assert error.value.value in (values, values[0])


def test_sparsities_have_names_of_their_own():
    with refuses("study.sparsities", 0.9999992):
        StudyConfig(sparsities=[0.9999991, 0.9999992], space=SPACE).check()


def test_cells_are_the_product_of_all_axes():
    config = StudyConfig(
        batch_sizes=[2, 4], sparsities=[0.9], grid={**METHOD, "model.momentum": [0.5, 0.9]}
    )
    assert len(config.cells) == 8
    assert {str(cell.series) for cell in config.cells} == {
        f"S=0.9 momentum={m} method={p}" for m in (0.5, 0.9) for p in ("snip", "random")
    }
    assert config.cells[0] == Cell(2, 0.9, (("model.momentum", 0.5), ("pruning.method", "random")))
    assert str(Series(0.5, (("model.network", "lit_dps.models.MLP"),))) == "S=0.5 network=MLP"


@pytest.mark.parametrize(
    ("grid", "key", "value"),
    [
        ({"goal.error": [0.1, 0.2]}, "study.grid", "goal.error"),
        ({"pruning.method": []}, "study.grid.pruning.method", []),
        ({"pruning.method": ["snip", "snip"]}, "study.grid.pruning.method", ["snip", "snip"]),
        ({"model.network": ["a.MLP", "b.MLP"]}, "study.grid.model.network", "b.MLP"),
        ({"model.momentum": [0.5, "high"]}, "study.grid.model.momentum", [0.5, "high"]),
        (
            {"model.momentum": [0.5], "model.network.momentum": [1]},
            "study.grid",
            ["momentum", "momentum"],
        ),
        ({"pruning.method": ["snip", "snap-it"]}, "pruning.method", "snap-it"),
        ({"pruning.init": ["original", "new"]}, "pruning.init", "new"),
        ({"model.learning_rate": [0.1, 0.2]}, "study.grid", "model.learning_rate"),
    ],
    ids=str,
)
def test_values_that_are_not_allowed_are_refused(grid, key, value):
    with refuses(key, value):
        check(setup(grid, batch_sizes=[16], sparsities=[0.5]))


def test_an_argument_that_the_model_does_not_have_is_refused():
    with pytest.raises(UserError) as refused:
        check(setup({"model.no_such": [1]}, batch_sizes=[16], sparsities=[0.5]))
    assert "no_such" in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_names_and_classes_reach_what_they_name():
    cell = Cell(16, 0.5, (("model.momentum", 0.3), ("model.network", "lit_dps.models.SimpleCNN")))
    built = WORKLOAD.build(Trial(cell, 0, {"model.learning_rate": 0.1}))
    assert isinstance(built.module.network, SimpleCNN) and built.module.hparams.momentum == 0.3
    assert isinstance(WORKLOAD.build(Trial(Cell(16, 0.5), 0, {})).module.network, MLP)


def test_what_is_below_a_class_of_an_axis_reaches_each_of_its_classes():
    mlp = Cell(16, 0.5, (("model.network", "lit_dps.models.MLP"),))
    for key in ("model.network.width", "model.init_args.network.init_args.width"):
        assert WORKLOAD.module(Trial(mlp, 0, {key: 7})).network.layers[1].out_features == 7
    workload = dataclasses.replace(WORKLOAD, batch_size_key="model.network.width")
    spec = workload.specs(Trial(mlp, 0, {}))["model"]["init_args"]["network"]
    assert spec == {"class_path": "lit_dps.models.MLP", "init_args": {"width": 16}}
    choices = {"model.network.width": 7, "model.network": "lit_dps.models.MLP"}
    assert WORKLOAD.module(Trial(Cell(16), 0, choices)).network.layers[1].out_features == 7


def test_values_that_earlier_versions_lost_below_a_class_are_of_another_study():
    below = {**SPACE, "model.network.width": Range(4, 8, integer=True)}

    def identity(grid, space=SPACE, key="data.batch_size"):
        found = setup(grid)
        study, workload = (dataclasses.replace(found.study, space=space), found.workload)
        workload = dataclasses.replace(workload, batch_size_key=key)
        return dataclasses.replace(found, study=study, workload=workload).identity(None)["study"]

    assert "below_classes" not in identity(NETWORK) and "below_classes" not in identity({}, below)
    assert "below_classes" not in identity({"model.network.width": [4], **NETWORK}), (
        "a grid's keys were set in order"
    )
    assert (
        identity(NETWORK, below)["below_classes"]
        and identity(NETWORK, key="model.network.width")["below_classes"]
    )


def test_each_axis_makes_the_trials_that_a_study_of_its_own_would():
    trials = [
        Trial(Cell(16, 0.9, (("pruning.method", method),)), 0, PARAMS)
        for method in METHOD["pruning.method"]
    ]
    for size in (1, 2):
        found = train(trials, WORKLOAD, GOAL, size=size)
        for result in found:
            own = {"method": dict(result.trial.cell.axes)["pruning.method"]}
            (alone,) = train([Trial(Cell(16, 0.9), 0, PARAMS)], WORKLOAD, GOAL, pruning=own)
            assert (result.status, result.steps, result.kept) == (
                alone.status,
                alone.steps,
                alone.kept,
            )
    assert len({str(result.kept) for result in found}) == 2, (
        "scores of one method are not taken for another's"
    )


def test_the_identity_knows_of_the_axes_but_not_of_their_values():
    plain = setup({}, batch_sizes=[16], sparsities=[0.5])
    data = plain.workload.build(Trial(Cell(16), 0, {})).data
    data.setup("fit")
    same = setup({"data.batch_size": [8, 16], "pruning.sparsity": [0.5]})
    assert plain.identity(data) == same.identity(data)
    one, more = (setup(grid).identity(data) for grid in (METHOD, {"pruning.method": ["snip"]}))
    assert one == more != plain.identity(data) and "method" not in one["pruning"]
    network = setup(NETWORK).identity(data)
    assert "network" not in network["model"]["init_args"] and "protocol" not in network
    foreign = setup(
        {"model.network": ["torch.nn.Identity", "tests.unit.engines.test_eligible.Branching"]}
    ).identity(data)
    assert "protocol" in foreign


def test_the_original_start_is_that_of_studies_without_the_key():
    plain = setup({}, batch_sizes=[16], sparsities=[0.5])
    data = plain.workload.build(Trial(Cell(16), 0, {})).data
    data.setup("fit")
    starts = [
        dataclasses.replace(plain, pruning=dataclasses.replace(plain.pruning, init=init))
        for init in ("original", "reinit")
    ]
    assert starts[0].identity(data) == plain.identity(data) != starts[1].identity(data)
    assert starts[1].identity(data)["pruning"]["init"] == "reinit"
    (run,) = [Attempt(Trial(Cell(16, 0.5), 0, PARAMS), plain.built_goal)]
    saved = Checkpoints(Path(), "a", 1.0, print)
    files = [
        setup.trial_settings(saved).checkpoint_file(run, "interval loop").identity
        for setup in (plain, *starts)
    ]
    assert files[0] == files[1] != files[2], "files of earlier versions are gone on from"


def test_checkpoints_have_the_code_and_the_data_of_their_run():
    sources = {"mine.py": ["bytes", "tree"]}
    environment = Environment({"sources": sources, "data": {"": ["data"]}})
    ran = dataclasses.replace(setup({}), environment=environment)
    stored = {"sources": sources, "data": {"": ["data"]}, "computed": {}}
    assert ran.checkpoints().environment == stored


def test_cells_are_run_in_groups_that_can_be_trained_together():
    cells = setup({**METHOD, **NETWORK}, batch_sizes=[4, 2], sparsities=[0.9, 0.5]).cells
    assert [cell.batch_size for cell in cells] == [2] * 8 + [4] * 8
    kinds = [(cell.batch_size, dict(cell.axes)["model.network"]) for cell in cells]
    assert (
        len(list(dict.fromkeys(kinds)))
        == 4
        == 1 + sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    )
    assert dataclasses.replace(setup(METHOD).study, trials=2).cells == setup(METHOD).study.cells


@pytest.mark.parametrize(
    ("key", "trainer"),
    [("trainer.strategy", {"devices": 2, "strategy": "fsdp"}), ("trainer.devices", {"devices": 0})],
)
def test_devices_and_strategies_are_refused_before_anything_is_built(key, trainer, monkeypatch):
    plain = setup({}, batch_sizes=[16], sparsities=[0.0])
    workload = dataclasses.replace(plain.workload, trainer={"accelerator": "cpu", **trainer})
    monkeypatch.setattr(Workload, "build", lambda *_: pytest.fail("a module was built"))
    with pytest.raises(ConfigError) as error:
        check(dataclasses.replace(plain, workload=workload))
    assert error.value.key == key


def test_each_method_of_an_axis_receives_the_options_that_it_takes():
    grid = {"pruning.method": ["snip", "rigl", "gradual"]}
    made = setup(grid, batch_sizes=[16], sparsities=[0.5])
    options = {"every": 7, "start": "uniform"}
    made = dataclasses.replace(made, pruning=dataclasses.replace(made.pruning, options=options))
    check(made)
    received = {}
    for cell in made.study.cells:
        config = made.trial_settings().resolve(Trial(cell, 0, PARAMS)).pruning
        received[config.method] = config.options
    assert received == {"snip": None, "rigl": options, "gradual": {"every": 7}}
    options = {"every": 7, "evry": 7}
    wrong = dataclasses.replace(made, pruning=dataclasses.replace(made.pruning, options=options))
    with refuses("pruning.options.evry"):
        check(wrong)


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        ({}, "Digits-MLP-momentum-linear-decay"),
        (METHOD, "Digits-MLP-momentum-linear-decay"),
        ({"model.optimizer": ["sgd", "adamw"]}, "Digits-MLP-linear-decay"),
        # An axis of one value does not vary.
        ({"model.optimizer": ["adamw"]}, "Digits-MLP-adamw-linear-decay"),
        ({"model.schedule": ["constant"]}, "Digits-MLP-momentum"),
        ({"model.schedule": ["constant", "linear"]}, "Digits-MLP-momentum"),
        (NETWORK, "Digits-momentum-linear-decay"),
    ],
)
def test_the_name_of_the_workload_omits_what_the_study_varies(grid, name):
    model = {**MODEL, "init_args": {**MODEL["init_args"], "schedule": "linear"}}
    assert setup(grid, model).workload_name() == name


def test_the_name_of_the_workload_omits_a_searched_update_rule():
    config = StudyConfig(space={**SPACE, "model.optimizer": Choices(["sgd", "adamw"])}, trials=1)
    workload = Workload(MODEL, DATA, {"accelerator": "cpu"})
    assert setup_of(config, StorageConfig(), workload, GOAL).workload_name() == "Digits-MLP"
