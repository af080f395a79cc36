"""docs/tutorial.md: its files are written as they stand there, its commands run, and what it says
comes out."""

from __future__ import annotations

import re
import shlex

import pandas as pd
import pytest

from tests.e2e.commands import ROOT, run, run_forked

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the files of the page, after its commands; what these said."""
    folder, said = tmp_path_factory.mktemp("tutorial"), []
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    for program, *arguments in COMMANDS:
        done = run(folder, *arguments) if program == "lit-dps" else run_forked(folder, arguments)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    return folder, said


@pytest.mark.slow
def test_the_tutorial_runs_and_says_what_it_shows(project):
    folder, (fit, forecast, study, sparse, look, again) = project
    assert re.search(
        r"^complete after \d+ steps: the goal is met, val_error 0\.\d+ at step \d+$",
        fit,
        re.MULTILINE,
    )
    assert re.search(r"^ *total +32 ", forecast, re.MULTILINE)
    assert "S=0.5" not in study and "S=0.5" in sparse
    heads = [line.split() for line in PAGE.splitlines() if re.match(r" +B +K\*", line)]
    assert len(heads) == 1 and heads[0] in [line.split() for line in study.splitlines()]
    table = pd.read_csv(folder / "mlruns/figures/signals/table.csv")
    assert len(table) == 8 and table["k_star"].notna().all()
    dense = table[table["sparsity"] == 0].sort_values("batch_size")["k_star"]
    assert dense.iloc[0] > dense.iloc[-1], "a large batch takes fewer steps"
    assert len(look.splitlines()) > 8 and (folder / "signals.png").exists()
    assert "complete after" in again and (folder / "best.ckpt").exists()
    assert {"report.html", "scaling.png", "ratios.png"} <= {
        path.name for path in (folder / "mlruns/figures/signals").iterdir()
    }
