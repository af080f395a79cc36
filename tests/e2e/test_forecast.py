"""`study --forecast`: tells what a study will take and leaves no trace."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import yaml

from lit_dps.storage.read import read_study
from tests.e2e.commands import FAST, run
from tests.e2e.test_plain_user import CONFIG
from tests.support.errors import error_line
from tests.support.texts import numbers_in

pytestmark = pytest.mark.slow
STUDY = ("study", "--config", FAST)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Counts are looked at, and no seconds: a fifth of what is timed for people."""
    monkeypatch.setattr("lit_dps.forecast.step_times.SECONDS", 0.2)


def rows(said: str) -> dict[str, list[str]]:
    """The lines of the table by their first column: a batch size, "pruning" or "total"."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in said.splitlines()]
    return {
        row[0]: row[1:] for row in cells if row[0].isdigit() or row[0] in ("B", "pruning", "total")
    }


def files(folder: Path) -> dict[str, str]:
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_a_forecast_of_a_new_study(tmp_path, call):
    done = call(*STUDY, "--forecast", "--study.noise_scale", "true")
    assert done.code == 0, done.err
    assert list(tmp_path.iterdir()) == []
    table = rows(done.out)
    # 4 trials at each of 2 sparsities, 80 steps, a check every 4
    assert table["16"][:3] == table["64"][:3] == ["8", "640", "160"]
    assert table["total"][:3] == ["16", "1,280", "320"]
    assert table["pruning"][0] == "8"  # the sparse trials
    assert table["B"][-1] == "time at most"
    assert "timed at B = 16, 64 with 1 thread\n" in done.out
    assert "expected: " not in done.out
    assert "exclude the noise scale" in done.out


def test_heats_are_steps_that_may_be_spent(call):
    done = call(*STUDY, "--forecast", "--study.race_factor", "1", "--goal.max_steps", "320")
    assert done.code == 0, done.err
    assert rows(done.out)["total"][:3] == [
        "16",
        "6,400",
        "1,600",
    ]  # 16 x (80 + 320), a check every 4
    (line,) = (line for line in done.out.splitlines() if line.startswith("at most: "))
    assert re.findall(r"\d+", line) == ["80", "320"]


@pytest.mark.long
def test_a_study_taken_up_needs_what_is_left_and_says_what_to_expect(tmp_path, call):
    part = ("--study.batch_sizes", "[64]", "--study.trials", "3")
    assert call(*STUDY, *part).code == 0
    before = files(tmp_path)
    done = call(*STUDY, "--forecast")
    assert done.code == 0, done.err
    assert files(tmp_path) == before
    table = rows(done.out)
    assert table["16"][:3] == ["8", "640", "160"]
    assert table["64"][:3] == ["2", "160", "40"]
    assert table["total"][:3] == ["10", "800", "200"]
    assert table["B"][-1] == "time expected"
    expected = re.search(
        r"expected: ([\d,]+) steps, from the mean steps at the nearest batch size, of 6 finished trials",
        done.out,
    )
    record = read_study(f"sqlite:///{tmp_path}/mlruns/study.db", "fast")
    ran = [result.steps_run for finished in record.results.values() for result in finished]
    assert int(expected[1].replace(",", "")) == round(
        10 * sum(ran) / 6
    )  # 64 is the only batch size, so the nearest

    nothing = call(*STUDY, *part, "--forecast")
    assert rows(nothing.out)["total"][:3] == ["0", "0", "0"]
    assert "\nall trials and repeats have finished\n" in nothing.out
    changed = call(*STUDY, "--goal.error", "0.3", "--forecast")
    assert (changed.code, files(tmp_path)) == (2, before)
    assert numbers_in(error_line(changed.err).partition("goal.error")[2])[:2] == [0.2, 0.3]


def test_a_users_own_module_and_data_are_timed(tmp_path):
    shutil.copy(Path(__file__).with_name("plain_user.py"), tmp_path)
    (tmp_path / "moons.yaml").write_text(yaml.safe_dump(CONFIG))
    done = run(tmp_path, "study", "--config", "moons.yaml", "--forecast")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert table["total"][:3] == [
        "12",
        "6,000",
        "600",
    ]  # the budget of 400 steps after a rung of 100
    assert table["pruning"][0] == "6"
    assert "2 trials at a time" in done.stdout
