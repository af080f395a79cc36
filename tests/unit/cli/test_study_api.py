"""`lit_dps.study` of objects is the study of the command; sections may be objects of classes."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lit_dps
from lit_dps import api
from lit_dps.core.errors import Unguarded
from lit_dps.core.search_space import Range
from lit_dps.storage.header import StudyChanged
from tests.e2e import advised_user
from tests.support.errors import refuses

HERE = "tests.e2e.advised_user"
GOAL = {"error": 0.05, "check_interval": 10, "max_steps": 400}
SPACE = {"model.lr": {"low": 0.05, "high": 0.2, "scale": "log"}}
QUICK = {"noise_scale": False, "workload": "known"}
CPU = {"accelerator": "cpu"}


def config(name: str) -> dict:
    """Return the configuration of the study, as a file has it."""
    return {
        "model": {"class_path": f"{HERE}.Module"},
        "data": {"class_path": f"{HERE}.Data"},
        "goal": GOAL,
        "trainer": CPU,
        "study": {
            "name": name,
            "batch_sizes": [16, 64],
            "sparsities": [0.0],
            "trials": 2,
            "workers": 1,
            "space": SPACE,
            **QUICK,
        },
        "storage": {"folder": "runs"},
    }


def study(name: str, **changes) -> lit_dps.Study:
    """Run the same study of objects."""
    arguments = {
        "goal": GOAL,
        "batch_sizes": (16, 64),
        "space": SPACE,
        "name": name,
        "trials": 2,
        "workers": 1,
        "storage": "runs",
        "trainer": CPU,
        "study": QUICK,
    }
    data = advised_user.Data()
    return lit_dps.study(advised_user.Module(), data, **{**arguments, **changes})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def by_file(tmp_path_factory) -> lit_dps.Study:
    """The study of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("file"))
        return lit_dps.run(config("file"))


def test_a_study_of_objects_has_the_trials_of_the_study_of_a_file(by_file):
    by_objects = study("objects")
    assert by_objects.cells.equals(by_file.cells)
    columns = ["batch_size", "point", "status", "steps", "lr"]
    assert by_objects.trials[columns].equals(by_file.trials[columns])
    assert by_file.cells["k_star"].notna().all()
    # The same name resumes the study: the finished trials stay.
    resumed = study("objects", trials=3)
    assert len(resumed.trials) == 6
    assert lit_dps.load("objects", "runs").report == resumed.report
    box = Range(0.05, 0.2, scale="log")
    assert len(study("objects", trials=3, space={"model.lr": box}).trials) == 6


def test_sections_may_be_objects_of_their_classes(by_file):
    given = config("classes")
    section = given["study"]
    given["study"] = lit_dps.StudyConfig(**section)
    given["goal"] = lit_dps.GoalConfig(**GOAL)
    given["storage"] = lit_dps.StorageConfig(folder="runs")
    by_classes = lit_dps.run(given)
    assert by_classes.cells.equals(by_file.cells)
    assert by_classes.analysis.record.name == "classes"


def test_it_refuses_what_the_command_refuses():
    with refuses("study.trials", 0):
        study("refused", trials=0)
    with refuses("study.batch_sizes"):
        study("refused", batch_sizes=[])
    with refuses("foo"):
        study("refused", foo=1)
    with refuses("pruning"):
        study("refused", pruning=lit_dps.StudyConfig())
    with refuses("goal"):
        study("refused", goal="val_loss about 0.2")


def test_classes_of_this_process_train_in_it():
    with refuses("study.workers", 2):
        lit_dps.study(
            lambda lr=0.1: advised_user.Module(lr),
            advised_user.Data,
            GOAL,
            [16],
            SPACE,
            workers=2,
        )


def test_a_study_resumes_if_its_function_trains_the_same():
    settings, rate = {"scale": 1.0}, 1e-4

    def make(lr=0.1):
        module = advised_user.Module(lr)
        module.layer.weight.data *= settings["scale"]
        settings["calls"] = settings.get("calls", 0) + 1
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), rate)
        return module

    def run(trials, batch_sizes=(64,), **options):
        arguments = (advised_user.Data, GOAL, batch_sizes, SPACE)
        common = {"name": "function", "trainer": CPU, "study": QUICK, "trials": trials}
        return lit_dps.study(make, *arguments, **common, **options)

    run(1)
    assert len(run(2).trials) == 2
    settings["scale"] = 2.0
    # In a study with another batch size the stored trial is trained again. If no trial remains, the
    # stored results are no answer either.
    for trials, batch_sizes in ((3, [32, 64]), (2, [64])):
        with pytest.raises(StudyChanged) as caught:
            run(trials, batch_sizes)
        [part] = caught.value.parts
        assert "norm of the initial weights" in part and "parameters" not in part
    settings["scale"], rate = 1.0, 2e-4
    with pytest.raises(StudyChanged) as caught:
        run(3)
    assert caught.value.parts[0] == "the constant model.rate"
    assert len(run(3, accept_code_change=True).trials) == 3


@pytest.fixture
def run_config(monkeypatch):
    """Return a list of the configurations that `lit_dps.study` passes on; nothing is run."""
    configs = []
    monkeypatch.setattr(api, "run", lambda config, accept: configs.append(config))
    return configs


@pytest.mark.parametrize("section", [{"workers": 3}, lit_dps.StudyConfig(workers=3)])
def test_workers_of_the_section_study_count(run_config, section):
    study("workers", workers=None, study=section)
    study("workers", workers=3, study=section)
    assert [config["study"]["workers"] for config in run_config] == [3, 3]
    with refuses("study.workers", 3):
        study("workers", workers=2, study=section)
    study("workers", workers=None)
    assert "workers" not in run_config[-1]["study"]


def test_an_argument_in_the_section_study_is_refused(run_config):
    for key, value in {"trials": 4, "seed": 1, "name": "x", "space": {}}.items():
        with refuses(f"study.{key}", value):
            study("twice", study={key: value})
    assert not run_config


def test_a_goal_object_keeps_the_defaults_of_a_study(run_config):
    study("goal", goal=lit_dps.GoalConfig(error=0.05))
    study("goal", goal={"error": 0.05, "early_reject": False})
    assert [config["goal"] for config in run_config] == [
        {"error": 0.05},
        {"error": 0.05, "early_reject": False},
    ]


def test_arrays_are_lists_in_the_configuration():
    given = {"low": np.float32(0.5), "choices": np.array([1, 2]), "nested": [np.int64(3)]}
    plain = api._plain(given)
    assert plain == {"low": 0.5, "choices": [1, 2], "nested": [3]}
    assert [type(value) for value in plain["choices"]] == [int, int]
    assert api._plain({"box": lit_dps.Choices([0.1, 0.2])})["box"]["choices"] == [0.1, 0.2]


def test_a_section_without_a_class_path_is_refused(run_config):
    arguments = (GOAL, [16], SPACE)
    with refuses("data.class_path", None):
        lit_dps.study(advised_user.Module, {"init_args": {}}, *arguments)
    with refuses("model.class_path", 3):
        lit_dps.study({"class_path": 3}, advised_user.Data, *arguments)
    # The command refuses a class path that cannot be imported.
    lit_dps.study(advised_user.Module, "no_module_here.Data", *arguments)
    assert "batch_size_key" not in run_config[0]["study"]


def test_a_script_without_a_guard_ends_before_it_prints(monkeypatch, capsys):
    def leave():
        raise SystemExit(64)

    monkeypatch.setattr(api, "leave_if_unguarded", leave)
    for function in (lit_dps.study, lit_dps.advise):
        with pytest.raises(SystemExit):
            function(advised_user.Module(), advised_user.Data(), GOAL, [16], SPACE)
    assert capsys.readouterr().err == ""
    for name in ("lit_dps.study", "lit_dps.run", "lit_dps.advise", "lit_dps.cli.main"):
        assert name in str(Unguarded())


def test_the_help_of_the_package_begins_with_the_function():
    text = lit_dps.study.__doc__
    assert text.startswith(str(api.study.__doc__).partition("\n")[0])
    assert text.index("lit_dps.study(model") < text.index("batch_sizes: Batch sizes to compare")


def test_the_package_of_studies_shows_the_signature_of_the_function():
    names = list(inspect.signature(lit_dps.study).parameters)
    assert names[:5] == ["model", "data", "goal", "batch_sizes", "space"]
    from lit_dps.study.setup import StudySetup

    assert lit_dps.study is sys.modules["lit_dps.study"]
    assert StudySetup.__module__ == "lit_dps.study.setup"


def test_a_notebook_has_one_line_that_is_updated(monkeypatch):
    from lit_dps.study.progress import notebook_line

    shown = []

    def display(data, **options):
        shown.append(data)
        return SimpleNamespace(update=lambda data, **options: shown.append(data))

    assert notebook_line() is None
    shell = SimpleNamespace(kernel=object())
    fake = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    line = notebook_line()
    line.write("cells 0/2\n")
    line.write("cells 1/2\n")
    line.flush()
    assert shown == [{"text/plain": "cells 0/2"}, {"text/plain": "cells 1/2"}]
