"""What may be written shorter on a command line: a file, and keys with dots below study.space and
study.grid."""

from __future__ import annotations

import json
from argparse import ArgumentParser

import pytest
import yaml

from lit_dps.cli import main
from lit_dps.cli.command_line import expand_short_forms
from lit_dps.cli.parser import likely_meant
from lit_dps.core.errors import UserError
from lit_dps.storage.advice_store import AdviceStore
from tests.e2e.commands import FAST
from tests.support.fake_study import law_study

SPACE = {
    "model.learning_rate": {"low": 1e-3, "high": 0.3, "scale": "log"},
    "model.momentum": {"low": 0.0, "high": 0.9},
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"study: {json.dumps({'space': SPACE, 'grid': {'pruning.method': ['snip', 'random']}})}\n"
    )
    return "mine.yaml"


def dotted(argv: list[str]) -> dict:
    """What stands for the keys with dots: by section."""
    changed = ("--study.space=", "--study.grid=")
    return {
        o.partition("=")[0]: json.loads(o.partition("=")[2]) for o in argv if o.startswith(changed)
    }


@pytest.mark.parametrize("verb", ["study", "fit", "analyze", "advise"])
def test_a_file_needs_no_option(config, verb):
    name = [] if verb == "fit" else ["--study.name=mine"]
    trials = ["--study.trials", "2"]
    assert expand_short_forms([verb, config, *trials]) == [verb, "--config", config, *trials, *name]
    assert expand_short_forms([verb, config, config])[1:] == ["--config", config] * 2 + name
    plain = [verb, "--config", config, "--study.name=x", "-c", config]
    assert expand_short_forms(plain) == plain


def test_verbs_that_take_no_configuration_are_left_alone():
    assert expand_short_forms(["figures", "quickstart"]) == ["figures", "quickstart"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("nothing.yaml", "study: no such file 'nothing.yaml'; a configuration file is needed"),
        ("quickstart", "needed; `lit-dps configs quickstart` copies that of the package here"),
        (
            "configs/studies/widht.yaml",
            "needed; `lit-dps configs studies/width` copies that of the package here",
        ),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_where_to_get_it(config, file, said, capsys):
    assert main(["study", file]) == 2
    assert capsys.readouterr().err.rstrip().endswith(said)


def test_one_part_of_one_box_is_changed(config):
    given = expand_short_forms(
        ["study", config, "--study.space.model.momentum.low", "0.5", "--study.trials=3"]
    )
    assert given[:3] == ["study", "--config", config] and given[3] == "--study.trials=3"
    assert dotted(given[4:]) == {
        "--study.space": SPACE | {"model.momentum": {"low": 0.5, "high": 0.9}}
    }
    given = expand_short_forms(
        ["study", f"--config={config}", "--study.space.model.learning_rate.high=1e-1"]
        + ["--study.space.model.width={choices: [16, 32]}", "--study.grid.optim.delay", "[0, 4]"]
    )
    boxes = SPACE | {"model.learning_rate": {"low": 1e-3, "high": 0.1, "scale": "log"}}
    assert dotted(given) == {
        "--study.space": boxes | {"model.width": {"choices": [16, 32]}},
        "--study.grid": {"pruning.method": ["snip", "random"], "optim.delay": [0, 4]},
    }


def test_the_last_whole_space_is_the_one_that_is_changed(config):
    whole = ["--study.space", "{model.lr: {low: 1e-3, high: 1}}"]
    given = expand_short_forms(["study", config, *whole, "--study.space.model.lr.high", "2"])
    assert json.loads(given[-2].partition("=")[2]) == {"model.lr": {"low": "1e-3", "high": 2}}
    assert given[3] == "--study.space={model.lr: {low: 1e-3, high: 1}}"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "--study.space.model.momentun.low",
            "study.space.model.momentun.low: 0.5 is not allowed; a range such as",
        ),
        ("--study.space.model.momentun.low", "did you mean model.momentum.low?"),
        ("--study.space.model.momentum.lwo", "of model.learning_rate, model.momentum"),
        ("--study.space.model.momentum", "study.space.model.momentum: 0.5 is not allowed"),
    ],
)
def test_what_is_no_part_of_a_box_is_refused(config, option, said):
    with pytest.raises(UserError) as refused:
        expand_short_forms(["study", config, option, "0.5"])
    assert said in str(refused.value)


def test_what_is_no_configuration_is_left_to_the_parser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("study: [1]\n")
    assert expand_short_forms(["study", "odd.yaml", "--config"]) == [
        "study",
        "--config",
        "odd.yaml",
        "--config",
        "",
    ]


def name_of(*words: str) -> str | None:
    """Return the name that a study gets on a command line; None if it gets none."""
    option, _, name = expand_short_forms(["study", *words])[-1].partition("=")
    return name if option == "--study.name" else None


def test_a_study_is_named_after_its_last_file(config, tmp_path):
    contents = {
        "a.b": "",
        "12": "",
        "named": "study: {name: x}",
        "section": "name: x",
        "nested": "study: section.yaml",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    assert (
        name_of(config)
        == name_of("-c", config)
        == name_of(f"--config={tmp_path / config}")
        == "mine"
    )
    assert (name_of(config, "a.b.yaml"), name_of("12.yaml")) == ("a.b", "12")
    for others in (
        ["named.yaml"],
        ["nested.yaml"],
        ["--study", "section.yaml"],
        ["--study={name: x}"],
    ):
        assert name_of(config, *others) is None
    assert name_of("named.yaml", config) is None
    assert expand_short_forms(["study", config, "--study.name", "x"])[-2:] == ["--study.name", "x"]
    assert expand_short_forms(["analyze", "--storage.folder", "there"])[-1] == "there"


def test_a_study_of_an_earlier_version_keeps_its_name(config, tmp_path):
    law_study(f"sqlite:///{tmp_path}/study.db", "study", trials=0)
    here = ["--storage.folder", str(tmp_path)]
    assert (name_of(config), name_of(config, *here)) == ("mine", "study")
    assert expand_short_forms(["masks", config, *here])[-1] == "--study.name=mine"
    law_study(f"sqlite:///{tmp_path}/study.db", "mine", trials=0)
    assert name_of(config, *here) == "mine"
    advice = f"sqlite:///{tmp_path}/advice.db"
    AdviceStore(advice, "study").keep(seed=0)
    assert name_of(config, "--storage", f"{{optuna: {advice}}}") == "study"


def test_the_name_of_a_file_is_refused_as_any_other(config, tmp_path, capsys, monkeypatch):
    base = yaml.safe_load(FAST.read_text())
    del base["study"]["name"]
    (tmp_path / "a(1).yaml").write_text(yaml.safe_dump(base))
    monkeypatch.setattr("sys.argv", ["lit-dps"])
    assert main(["study", "a(1).yaml", "--forecast"]) == 2
    refused = capsys.readouterr().err
    assert (
        refused.startswith("lit-dps: error: study.name: 'a(1)' is not allowed")
        and refused.count("\n") == 1
    )


@pytest.mark.parametrize("stem", ["12", "1e3", "null", "true", "2024-01-31", "my config"])
def test_the_name_of_a_file_is_a_text(stem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()
    (tmp_path / f"{stem}.yaml").write_text("study: {trials: 1}\n")
    law_study(f"sqlite:///{tmp_path}/mlruns/study.db", stem, trials=1)
    assert main(["analyze", f"{stem}.yaml"]) == 0
    assert f"study {stem}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stduy", "unknown verb 'stduy'; did you mean lit-dps study? "),
        ("mine.yaml", "did you mean lit-dps study mine.yaml? "),
        ("xyzzy", "unknown verb 'xyzzy'; there are fit, "),
    ],
)
def test_a_verb_that_is_none(word, said, capsys):
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "near"),
    [
        (
            "model: ... module 'lit_dps.module' has no attribute: lit_dps.module.ImageClasifier",
            "lit_dps.module.ImageC",
        ),
        ("data: Expected a dot import path string: Digist", "lit_dps.data.Digits"),
        ("model: Option 'learning_rte' is not accepted", "model.learning_rate"),
        ("unrecognized arguments: --goal.eror 1", "--goal.error"),
        ("Subcommand 'fit' does not accept option 'goal.eror'", "goal.error"),
        ("Option 'gaol.error' is not accepted", "goal.error"),
        ("model: Option 'xyzzy' is not accepted", None),
        ("trainer: lit_dps.module.ImageClassifier is no accelerator", None),
    ],
)
def test_what_was_likely_meant(tmp_path, monkeypatch, text, near):
    import lit_dps.data  # as the parser has that asks
    import lit_dps.module  # noqa: F401

    (tmp_path / "c.yaml").write_text("model: {class_path: lit_dps.module.ImageClassifier}\n")
    monkeypatch.setattr("sys.argv", ["lit-dps fit", "--config", str(tmp_path / "c.yaml")])
    parser, below = ArgumentParser(), ArgumentParser()
    below.add_argument("--goal.error")
    parser.add_argument("verb", choices={"fit": below})
    said = likely_meant(text, parser)
    assert said.startswith(f"; did you mean {near}") if near else said == ""


def test_without_a_configuration_it_is_said_where_they_are():
    said = likely_meant(
        "the following arguments are required: fit.data, fit.model", ArgumentParser()
    )
    assert (
        said == "; a configuration file has them, and `lit-dps configs` lists those of the package"
    )
