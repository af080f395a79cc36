"""Commands called from a user's own script; with processes of their own, the script needs
multiprocessing's guard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lit_dps.core.errors import Unguarded
from lit_dps.core.exit_codes import ExitCode
from tests.e2e.commands import FAST, real, results, run_forked

pytestmark = pytest.mark.slow
TWO_RANKS = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
COMMANDS = {
    "workers": ["study", "--config", str(FAST), "--study.trials", "1", "--study.workers", "2"],
    "ranks": ["study", "--config", str(FAST), "--study.trials", "1", *TWO_RANKS],
    "fit": ["fit", "--config", str(FAST), "--goal.max_steps", "4", *TWO_RANKS],
}


def run_script(folder: Path, text: str, run=run_forked) -> subprocess.CompletedProcess:
    (folder / "script.py").write_text(text)
    return run(folder, ["script.py"], timeout=120)


@pytest.mark.parametrize(
    ("argv", "run"),
    [(c, real if k == "workers" else run_forked) for k, c in COMMANDS.items()],
    ids=COMMANDS,
)
def test_a_script_without_a_guard_is_told_so_once(tmp_path, argv, run):
    call = (
        f"from lit_dps.cli import main\ncode = main({argv!r})\nprint('ended')\nraise "
        "SystemExit(code)\n"
    )
    done = run_script(tmp_path, call, run)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("lit-dps: error: ")]
    assert len(errors) == 1 and errors[0] == f"lit-dps: error: {Unguarded()}"
    assert "Traceback" not in done.stderr and "warning" not in done.stderr
    assert done.stdout.count("ended") <= 1, "the script ran on in another process"
    assert not results(tmp_path / "mlruns" / "study.db")


@pytest.mark.long
def test_a_script_with_a_guard_runs_a_study(tmp_path):
    call = f"raise SystemExit(main({COMMANDS['workers']!r}))"
    done = run_script(
        tmp_path, f"from lit_dps.cli import main\nif __name__ == '__main__':\n    {call}\n"
    )
    assert done.returncode == ExitCode.NO_RESULT, done.stderr
    assert len(results(tmp_path / "mlruns" / "study.db")) == 4


def test_another_process_that_runs_the_script_again_says_so_itself(tmp_path):
    call = """
import multiprocessing
from lit_dps.cli import main
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print, args=("never",))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
main(["study", "--help"])
"""
    done = run_script(tmp_path, call)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(Unguarded()) in done.stderr


LATE_VALUE = """
import lit_dps
import torch
from lit_dps.data import Digits
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier

CONFIG = {"scale": torch.tensor(1.0)}

class Net(ImageClassifier):
    def __init__(self, lr: float = 0.1):
        super().__init__(MLP(width=8), learning_rate=lr)
        for weight in self.parameters():
            weight.data *= CONFIG["scale"]

if __name__ == "__main__":
    CONFIG["scale"] = torch.tensor(2.0)
    space = {"model.lr": {"low": 0.01, "high": 0.1}}
    study = lit_dps.study(
        Net, Digits, "val_error <= 0.9", [32], space, max_steps=8, check_interval=4, trials=1,
        trainer={"accelerator": "cpu", "strategy": "ddp"},
    )
    print(len(study.trials), "trials of scale", float(CONFIG["scale"]))
"""


@pytest.mark.long
def test_ranks_of_torchrun_run_the_whole_script(tmp_path):
    """Without torchrun, `test_a_study_takes_objects_too` refuses ranks and workers."""
    (tmp_path / "script.py").write_text(LATE_VALUE)
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = real(tmp_path, ["-m", "torch.distributed.run", *options, "script.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 trials of scale 2.0") == 2
