"""`--json` prints one document alone on stdout; progress and texts are on stderr."""

from __future__ import annotations

import json

import pytest

import lit_dps
from lit_dps.core.exit_codes import ExitCode
from tests.e2e.commands import FAST, run

TINY = ("--study.batch_sizes", "[16]", "--study.sparsities", "[0]", "--study.trials", "2")


@pytest.mark.slow
def test_study_and_analyze_print_the_document_of_the_study(tmp_path):
    options = (*TINY, "--json", "--validate-every", "8")
    studied = run(tmp_path, "study", FAST, *options)
    assert studied.returncode == ExitCode.DONE, studied.stderr
    document = json.loads(studied.stdout)
    assert (document["name"], document["source"]) == ("fast", "study")
    assert (tmp_path / document["report"]).is_file()
    assert sum(document["cells"][0]["trials"].values()) == 2
    assert f" {round(document['cells'][0]['k_star']['value'])} " in studied.stderr
    cell = document["cells"][0]
    assert cell["validation_seconds"] > 0 and document["recommendation"] == cell
    assert cell["timing"] == "trials" and document["step_timing"] is None
    analyzed = run(tmp_path, "analyze", FAST, "--json", "--validate-every", "8")
    assert analyzed.returncode == ExitCode.DONE, analyzed.stderr
    assert json.loads(analyzed.stdout) == document
    record = lit_dps.load("fast", tmp_path / "mlruns").analysis.record
    study = lit_dps.Study(record, lit_dps.Analysis(record, validate_every=8))
    assert study.to_dict(document["report"]) == document


@pytest.mark.slow
def test_fit_prints_the_document_of_its_run(tmp_path):
    options = ("--checkpoint", "kept.ckpt", "--trainer.enable_progress_bar", "false")
    fitted = run(tmp_path, "fit", FAST, "--json", *options)
    assert fitted.returncode == ExitCode.DONE, fitted.stderr
    document = json.loads(fitted.stdout)
    assert document["source"] == "fit" and document["goal"] == "goal error 0.2"
    assert document["checkpoint"] == "kept.ckpt"
    assert (tmp_path / "kept.ckpt").is_file()
    cell = document["cells"][0]
    assert cell["batch_size"] == 128
    assert cell["examples"] == 128 * cell["steps"]["value"] > 0
    assert document["outcome"] in fitted.stderr


@pytest.mark.slow
def test_an_error_prints_no_document(tmp_path):
    refused = run(tmp_path, "study", FAST, "--json", "--study.trials", "0")
    assert (refused.returncode, refused.stdout) == (ExitCode.REFUSED, "")
    for options in (["--json", "--forecast"],):
        assert run(tmp_path, "study", FAST, *options).returncode == ExitCode.REFUSED
    for option in ("--scale=model.width=512", "--examples=1000"):
        assert run(tmp_path, "analyze", FAST, "--json", option).returncode == ExitCode.REFUSED
