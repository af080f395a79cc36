"""What may be written shorter on a command line: a file, and keys with dots below study.space and study.grid."""

from __future__ import annotations

import json
from argparse import ArgumentParser

import pytest

from lit_dps.cli import main
from lit_dps.cli.arguments import spelled_out
from lit_dps.cli.suggestions import likely_meant
from lit_dps.errors import UserError

SPACE = {"model.learning_rate": {"low": 1e-3, "high": 0.3, "scale": "log"}, "model.momentum": {"low": 0.0, "high": 0.9}}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        f"study: {json.dumps({'space': SPACE, 'grid': {'pruning.method': ['snip', 'random']}})}\n"
    )
    return "mine.yaml"


def dotted(argv: list[str]) -> dict:
    """What stands for the keys with dots: by section."""
    return {o.partition("=")[0]: json.loads(o.partition("=")[2]) for o in argv if o.startswith("--study.")}


@pytest.mark.parametrize("verb", ["study", "fit", "analyze", "advise"])
def test_a_file_needs_no_option(config, verb):
    assert spelled_out([verb, config, "--study.trials", "2"]) == [verb, "--config", config, "--study.trials", "2"]
    assert spelled_out([verb, config, config])[1:] == ["--config", config] * 2
    plain = [verb, "--config", config, "--study.name=x", "-c", config]
    assert spelled_out(plain) == plain


def test_verbs_that_take_no_configuration_are_left_alone():
    assert spelled_out(["figures", "quickstart"]) == ["figures", "quickstart"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("nothing.yaml", "study: no such file 'nothing.yaml'; a configuration file is needed"),
        ("quickstart", "needed; `lit-dps configs quickstart` copies that of the package here"),
        ("configs/studies/widht.yaml", "needed; `lit-dps configs studies/width` copies that of the package here"),
    ],
)
def test_a_file_that_is_not_there_is_refused_with_where_to_get_it(config, file, said, capsys):
    assert main(["study", file]) == 2
    assert capsys.readouterr().err.rstrip().endswith(said)


def test_one_part_of_one_box_is_changed(config):
    given = spelled_out(["study", config, "--study.space.model.momentum.low", "0.5", "--study.trials=3"])
    assert given[:3] == ["study", "--config", config] and given[3] == "--study.trials=3"
    assert dotted(given[4:]) == {"--study.space": SPACE | {"model.momentum": {"low": 0.5, "high": 0.9}}}
    given = spelled_out(
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
    given = spelled_out(["study", config, *whole, "--study.space.model.lr.high", "2"])
    assert json.loads(given[-1].partition("=")[2]) == {"model.lr": {"low": "1e-3", "high": 2}}
    assert given[3] == "--study.space={model.lr: {low: 1e-3, high: 1}}"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--study.space.model.momentun.low", "study.space.model.momentun.low: 0.5 is not allowed; a range such as"),
        ("--study.space.model.momentun.low", "did you mean model.momentum.low?"),
        ("--study.space.model.momentum.lwo", "of model.learning_rate, model.momentum"),
        ("--study.space.model.momentum", "study.space.model.momentum: 0.5 is not allowed"),
    ],
)
def test_what_is_no_part_of_a_box_is_refused(config, option, said):
    with pytest.raises(UserError) as refused:
        spelled_out(["study", config, option, "0.5"])
    assert said in str(refused.value)


def test_what_is_no_configuration_is_left_to_the_parser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.yaml").write_text("study: [1]\n")
    assert spelled_out(["study", "odd.yaml", "--config"]) == ["study", "--config", "odd.yaml", "--config", ""]


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
        ("model: ... module 'lit_dps.module' has no attribute: lit_dps.module.ImageClasifier", "lit_dps.module.ImageC"),
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
    said = likely_meant("the following arguments are required: fit.data, fit.model", ArgumentParser())
    assert said == "; a configuration file has them, and `lit-dps configs` lists those of the package"
