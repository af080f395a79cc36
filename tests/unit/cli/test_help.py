"""The short help has every key of the package; the configuration files come with it."""

from __future__ import annotations

import tomllib
from dataclasses import fields

import pytest
import yaml

from lit_dps.cli import VERBS, main, shipped
from lit_dps.cli import help as ours
from lit_dps.cli.config_file import SECTION_CLASSES
from lit_dps.cli.options import OPTIONS, docs_of, option_of
from lit_dps.core.exit_codes import ExitCode
from tests.e2e.commands import ROOT


@pytest.mark.parametrize("verb", ours.HELPED)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_every_key_and_option_once_in_80_columns(verb, flag, capsys):
    assert main([verb, flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= ours.WIDTH
    expected = {"--config", "--print_config", "--help-all", "--model.help"}
    for section, cls in SECTION_CLASSES.items():
        if section != "study" or verb not in ours.SINGLE_TRIAL:
            expected |= {f"--{section}.{field.name}" for field in fields(cls)}
    if verb in OPTIONS:
        expected |= {option_of(field.name) for field in fields(OPTIONS[verb])}
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(options) == len(set(options)) and expected <= set(options)
    assert set(options) - expected <= {"--engine", "--ckpt_path"}


@pytest.mark.parametrize(
    ("verb", "default"), [("study", "true"), ("advise", "true"), ("fit", "false")]
)
def test_the_default_is_the_one_of_the_verb(verb, default, capsys):
    main([verb, "--help"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "goal.early_reject" in line]
    assert line.endswith(f"({default}).")


@pytest.mark.parametrize("cls", [*SECTION_CLASSES.values(), *OPTIONS.values()])
def test_every_field_has_a_sentence(cls):
    assert docs_of(cls).keys() == {field.name for field in fields(cls)}


def test_the_list_of_verbs_has_a_line_for_each(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= ours.WIDTH
    codes = [str(code.value) for code in ExitCode]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [*VERBS, *codes]


def test_each_exit_code_has_one_sentence_in_the_help(capsys):
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for code in ExitCode:
        assert f"  {code.value:<4} {code.meaning}" in lines


def test_the_files_of_the_package_are_those_of_the_repository():
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert shipped.names()[0] == "quickstart"
    assert sorted(shipped.FOLDER / f"{name}.yaml" for name in shipped.names()) == [
        shipped.FOLDER / path.relative_to(ROOT / "configs") for path in files
    ]


def test_the_files_of_the_package_go_into_a_wheel():
    from setuptools import find_namespace_packages

    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_namespace_packages(str(ROOT), include=asked["packages"]["find"]["include"])
    for path in shipped.FOLDER.rglob("*.yaml"):
        package = ".".join(("lit_dps", *path.relative_to(ROOT / "lit_dps").parts[:-1]))
        assert package in packages and "*.yaml" in asked["package-data"]["*"], path


@pytest.mark.parametrize("width", [60, 80, 140])
def test_configs_are_listed_at_the_width_of_the_terminal(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert f"  {max(shipped.names(), key=len)}" in "\n".join(lines)
    has_full_summary = "Handwritten digits, Simple-CNN, momentum: a few minutes" in "\n".join(lines)
    assert has_full_summary == (width == 140)


def test_a_file_is_run_by_a_verb_that_takes_it():
    verbs = {}
    for name in shipped.names():
        file = shipped.FOLDER / f"{name}.yaml"
        verbs[name] = shipped.verb_of(file)
        if verbs[name] == "study":
            assert yaml.safe_load(file.read_text(encoding="utf-8"))["study"]["space"], name
    assert verbs["quickstart"] == verbs["advice/pairs-exhaustive"] == "study"
    assert [name for name in verbs if verbs[name] == "masks"] == ["studies/masks"]
    assert verbs["advice/pairs"] == "advise"


def test_configs_lists_and_copies(tmp_path, monkeypatch, capsys, golden):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    golden.check("cli/configs.txt", listed)
    assert main(["configs", "quickstart", "width", "--to", "here"]) == 0
    golden.check("cli/configs-copied.txt", capsys.readouterr().out)
    assert yaml.safe_load((tmp_path / "here" / "width.yaml").read_text())["study"]["name"]
    for argv, said in (
        (["quickstart", "--to", "here"], "quickstart.yaml"),
        (["quikstart"], " quickstart?"),
        (["xyzzy"], "'xyzzy'"),
        (["mnist-sgd", "replication/mnist-sgd"], "mnist-sgd"),
    ):
        assert main(["configs", *argv]) == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert main(["configs", "text-transformer", "--to", "there"]) == 0
    copied = capsys.readouterr().out
    assert "there/warm_text.py" in copied
    assert "lit-dps advise there/text-transformer.yaml" in copied
    assert {path.name for path in (tmp_path / "there").iterdir()} == {
        "text-transformer.yaml",
        "warm_text.py",
    }
