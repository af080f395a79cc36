"""The printed answer of advice: a warm-up that is longer than K, failed probes, and a storage that
refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_dps.advice.options import Options
from lit_dps.advice.probe_study import Probes
from lit_dps.advice.question import Question
from lit_dps.advice.report import tell
from lit_dps.advice.step_probe import SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.storage.advice_store import AdviceStore
from tests.unit.advice.test_probe_study import CannotRun, probes, run
from tests.unit.advice.test_step_probe import Net

WARM_UP = 12
SIZES = 2, 8, 32


class WarmedUp(Net):
    """Meets its goal after 32 / B + 4 steps, with a warm-up of 12. A batch of 16 does not fit."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.progress = 0.0

    def training_step(self, batch, batch_idx):
        size = len(batch[0])
        if size == 16:
            raise MemoryError
        self.progress += 1 / (32 / size + 4)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_error", max(0.0, 1 - self.progress))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / (WARM_UP + 1))
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def probed(folder) -> Probes:
    work = probes(folder, "Net")
    workload = dataclasses.replace(
        work.setup.workload, model={"class_path": f"{__name__}.WarmedUp"}
    )
    work.setup = dataclasses.replace(
        work.setup, workload=workload, goal=dataclasses.replace(work.setup.goal, max_steps=40)
    )
    return work


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Three probes, and one that found no room."""
    work = probed(tmp_path_factory.mktemp("told"))
    for size in SIZES:
        assert run(work, size)
    with pytest.raises(CannotRun):
        run(work, 16)
    work.view = SimpleNamespace(
        further=lambda *a, **kw: None, sync=lambda *a, **kw: None, experiment_id=None
    )
    times = StepTimes([Timed(m, 0.01 + 1e-3 * m) for m in SIZES], check=0.01, largest=32, why=SPENT)
    store = AdviceStore(work.url, work.name)
    return Question(work.setup, Options(60, trials=2), store, work, None, times, None, 10)


def test_the_answer_names_the_warm_up_and_what_failed_though_no_file_can_be_written(case, capsys):
    (Path(case.setup.storage.folder) / "figures").write_text("a file in the folder's place")
    tell(case)
    printed = capsys.readouterr().out
    assert f"your warm-up of {WARM_UP} steps is longer than K" in printed
    assert "run B = " in printed and "not written: " in printed
    assert "at B = 16 1 of 2 trials failed, the last with MemoryError" in printed
    assert "for want of time" not in printed
