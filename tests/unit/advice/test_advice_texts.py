"""The printed answer of advice: of the user's run and others, of forks, and of neither."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml

from lit_dps.advice.options import Options
from lit_dps.advice.pilot_evidence import PilotRun
from lit_dps.advice.pilot_plan import PilotPlan
from lit_dps.advice.question import Question
from lit_dps.advice.recommendation import _config
from lit_dps.advice.report import publish_answer
from lit_dps.advice.step_probe import FULL, SPENT, StepTimes
from lit_dps.advice.step_time import Timed
from lit_dps.core.trial_config import OptimConfig
from lit_dps.readings.branching import Fork
from lit_dps.storage.advice_store import AdviceStore
from tests.support.texts import numbers_in
from tests.unit.advice.test_probe_study import CannotRun, probes, run
from tests.unit.advice.test_step_probe import Net

WARM_UP = 12
SIZES = 2, 8, 32
PLAN = PilotPlan(2, "model.lr", 0.08, 1.0, is_adaptive=False)


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


class FakeMlflow:
    """Counts calls."""

    experiment_id = None

    def __init__(self):
        self.logged = []

    def log_result(self, result):
        """Results of trials are not counted."""

    def sync(self, *args, **options):
        self.logged.append("record")

    def log_outcome(self, *args, **options):
        self.logged.append("outcome")


def question_in(
    folder, times: StepTimes, options: Options, plan: PilotPlan | None, **workload
) -> Question:
    given = probes(folder, "Net")
    setup = dataclasses.replace(
        given.setup,
        workload=dataclasses.replace(given.setup.workload, **workload),
        goal=dataclasses.replace(given.setup.goal, max_steps=40),
    )
    given.setup = setup
    given.mlflow = FakeMlflow()
    store = AdviceStore(given.url, given.name)
    return Question(setup, options, store, given, None, times, 10, plan=plan)


def step_times(**values) -> StepTimes:
    timed = [Timed(m, 0.01 + 1e-3 * m) for m in SIZES]
    return StepTimes(timed, **{"check": 0.01, "largest": 32, "reason": SPENT, **values})


def printed(question: Question, capsys, folder) -> str:
    publish_answer(question)
    return capsys.readouterr().out.replace(str(folder), "FOLDER")


def test_the_answer_names_the_warm_up_and_what_failed_though_no_file_can_be_written(
    tmp_path, capsys, golden
):
    """Runs at three batch sizes, and at one that found no room."""
    model = {"class_path": f"{__name__}.WarmedUp"}
    question = question_in(tmp_path, step_times(), Options(60), PLAN, model=model)
    for size in SIZES:
        assert run(question.probes, size)
    pilot = PilotRun.of_record(question.probes.record(), PLAN)
    # Times that were measured would differ between machines.
    question.store.keep(pilot={**pilot.to_dict(), "check_seconds": None})
    with pytest.raises(CannotRun):
        run(question.probes, 16)
    (tmp_path / "figures").write_text("a file in the folder's place")
    capsys.readouterr()
    golden.check("advice/probed.txt", printed(question, capsys, tmp_path))


def test_forks_give_no_answer_at_a_batch_size_that_a_note_leaves_out(tmp_path):
    """The run takes 30 steps at B = 4. More than 8 steps at B = 16 are beyond 130 examples."""
    question = question_in(tmp_path, step_times(), Options(60, "branch"), None)
    goal = dataclasses.replace(question.setup.goal, max_examples=130, max_seconds=1.0)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, goal=goal))
    fork = Fork(5, 4, (1, 2, 4), (1.0, 1.0, 1.5), (0.0, 0.05, 0.1), 0.1)
    question.store.append("branches", fork.to_dict())
    question.store.keep(branch_steps=30, branch_adaptive=False, max_steps=40)
    advice = publish_answer(question)
    (note,) = [note for note in advice.notes if "is left out" in note]
    assert numbers_in(note) == [16, 40, 130], "goal.max_seconds is not considered"
    assert set(advice.answer.table["batch_size"]) == {4, 8}
    assert 16 not in set(advice.steps["batch_size"])


def test_forks_give_an_answer_and_a_configuration(tmp_path, capsys, golden):
    options = Options(60, "branch", (1, 2), 2.0)
    question = question_in(tmp_path, step_times(waited=0.5), options, None)
    for fork in (
        Fork(5, 4, (1, 2, 4), (1.0, 1.0, 1.5), (0.0, 0.05, 0.1), 0.1),
        Fork(20, 4, (1, 2, 4), (0.5, 0.51, 0.52), (0.0, 0.01, 0.02), 0.1),
    ):
        question.store.append("branches", fork.to_dict())
    question.store.keep(branch_steps=30, branch_adaptive=False, max_steps=40)
    golden.check("advice/forked.txt", printed(question, capsys, tmp_path))
    folder = tmp_path / "figures" / "steps" / "advice"
    config = yaml.safe_load((folder / "fit.yaml").read_text())
    storage = config["trainer"]["callbacks"][-1]["init_args"].pop("storage")
    assert storage == question.store.url
    config = json.loads(json.dumps(config), parse_float=lambda x: float(f"{float(x):.6g}"))
    golden.check("advice/forked-fit.yaml", yaml.safe_dump(config, sort_keys=False))
    table = pd.read_csv(folder / "answer.csv")
    golden.check("advice/forked.csv", table.to_csv(index=False, float_format="%.6g"))
    assert question.probes.mlflow.logged == ["outcome", "outcome"]


def test_the_configuration_trains_as_the_runs_did(tmp_path):
    """A batch has parts of equal size, and the goal is for the average of the weights."""
    times = StepTimes([Timed(m, 1 + 1e-3 * m) for m in (2, 8)], largest=8, is_memory_full=True)
    question = question_in(tmp_path, times, Options(60, "branch"), None)
    optim = OptimConfig(average_half_life=300)
    question = dataclasses.replace(question, setup=dataclasses.replace(question.setup, optim=optim))
    best = {"batch_size": 20, "devices": 1}
    result = SimpleNamespace(best=best, step_time=question.step_time)
    config = _config(question, question.setup, {}, result, is_predicted=False)
    assert config["optim"]["average_half_life"] == 300
    # 3 parts fit in memory, but 20 is no multiple of 3.
    assert config["trainer"]["accumulate_grad_batches"] == 4
    assert config["data"]["init_args"]["batch_size"] == 5


def test_without_a_run_it_says_so_and_mlflow_is_not_started(tmp_path, capsys, golden):
    options = Options(60, devices=(1, 4))
    times = step_times(reason=FULL, is_memory_full=True)
    question = question_in(tmp_path, times, options, PLAN)
    golden.check("advice/no-probe.txt", printed(question, capsys, tmp_path))
    assert question.probes.mlflow.logged == []
