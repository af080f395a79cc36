"""What advice takes from a configuration, and how Adam's time scales move with the batch size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_dps.advice.options import STORE_SECONDS, Clock, Options, seconds_of
from lit_dps.advice.prediction import calibrate
from lit_dps.advice.report import adaptive_text
from lit_dps.advice.user_workload import (
    prepare_pilot,
    probe_setup,
    rate_range,
    user_batch_size,
)
from lit_dps.cli.study import read_setup
from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.config import cores
from lit_dps.core.errors import ConfigError
from lit_dps.parallel.process import cpu_wait_seconds
from lit_dps.training import AdamScalingCallback
from lit_dps.training.adam_scaling import AdamScales, adam_scales_of
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.texts import numbers_in
from tests.support.tiny import Plain, Recorder, fit, loader
from tests.unit.advice.test_step_probe import setup as steps_setup

MODULE, DATA = "tests.e2e.plain_user.Classifier", "tests.e2e.plain_user.TwoMoons"


def workload(model=None, **data) -> Workload:
    return Workload(
        model or {"class_path": MODULE}, {"class_path": DATA, "init_args": data}, {}, "data.batch"
    )


def test_the_rate_is_found_by_name_wherever_it_stands():
    box = rate_range(workload())["model.lr"]
    assert (box.low, box.high, box.scale) == (0.01 / 32, 0.32, "log")
    nested = {
        "class_path": MODULE,
        "init_args": {"lr": None, "body": {"class_path": "x", "init_args": {"lr": 0.5}}},
    }
    assert list(rate_range(workload(nested))) == ["model.body.lr"]
    with pytest.raises(ConfigError) as refused:
        rate_range(workload({"class_path": MODULE, "init_args": {"learning_rate": 0.1}}))
    assert refused.value.key == "study.space"


def test_the_user_batch_size_is_that_of_a_step():
    assert user_batch_size(workload()) == 16
    accumulated = Workload(
        {"class_path": MODULE},
        {"class_path": DATA, "init_args": {"batch": 8}},
        {"accumulate_grad_batches": 4},
        "data.batch",
    )
    assert user_batch_size(accumulated) == 32
    with pytest.raises(ConfigError) as refused:
        user_batch_size(Workload({"class_path": MODULE}, {"class_path": DATA}, {}, "data.size"))
    assert (refused.value.key, refused.value.value) == ("study.batch_size_key", "data.size")


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("0", cores()), ("", cores())])
def test_runs_have_the_threads_with_which_their_steps_are_timed(monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    study = steps_setup()
    assert study.study.threads == 1
    assert probe_setup(study, None).study.threads == threads


def test_a_callback_of_the_user_is_not_added_again(monkeypatch):
    folder = Path(__file__).resolve().parents[3] / "configs" / "advice"
    monkeypatch.syspath_prepend(folder)
    setup = read_setup(["--config", str(folder / "characters.yaml")])
    probes = prepare_pilot(setup).setup
    # Its warm-up is scaled by the callback of the configuration, and AdamW by that of advice.
    classes = [each["class_path"] for each in probes.workload.trainer["callbacks"]]
    names = ["ScheduleScalingCallback", "AdamScalingCallback"]
    assert classes == [f"lit_dps.training.{name}" for name in names]


def test_budgets_are_times():
    assert [seconds_of(text) for text in ("90s", "30m", "1.5h", "2 min")] == [90, 1800, 5400, 120]
    for text in ("0s", "30", "-1m", "h", "1w"):
        with pytest.raises(ConfigError) as refused:
            seconds_of(text)
        assert (refused.value.key, refused.value.value) == ("--budget", text)
    for key, value in (("bandwidth", 0), ("price", -1.0), ("latency", -1)):
        with pytest.raises(ConfigError) as refused:
            Options(60, **{key: value})
        assert (refused.value.key, refused.value.value) == (f"--{key}", value)


def test_the_time_of_asking_is_stored_along_the_way(monkeypatch):
    class Kept:
        spent = None

        def keep(self, spent):
            self.spent = spent

    now, store = [1000.0], Kept()
    monkeypatch.setattr("lit_dps.advice.options.time.monotonic", lambda: now[0])
    clock = Clock(100, store, spent=20)
    assert clock.remaining == 100 - 12 - 20
    clock.tick()
    assert store.spent is None
    now[0] += STORE_SECONDS + 1
    clock.tick()
    assert store.spent == 26 and clock.remaining == 62
    assert Clock(20, store, 0).remaining == 15 and Clock(3600, store, 0).remaining == 3580
    assert Clock(100, store, 20, began=now[0] - 8).remaining == 100 - 12 - 20 - 8, "imports count"


def test_beta2_and_weight_decay_are_told_at_the_recommended_batch_size():
    adamw = torch.optim.AdamW(
        [torch.zeros(2, requires_grad=True)], lr=0.3, betas=(0.9, 0.99), weight_decay=0.01
    )
    sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1, weight_decay=0.01)
    assert adam_scales_of([sgd]) is None and adam_scales_of([sgd, adamw]) == AdamScales(
        0.99, 0.01, 0.3
    )
    texts = [
        adaptive_text(32, 128, 0.99, 0.01),
        adaptive_text(32, 128, 0.99, 0.01, 2.0),
        adaptive_text(32, 1, 0.999, 0),
        adaptive_text(32, 128, None, 0.1),
    ]
    # beta2 and weight decay at B; those of the reference; its batch size.
    assert [numbers_in(text) for text in texts] == [
        [0.960596, 0.04, 0.99, 0.01, 32],
        [0.960596, 0.02, 0.99, 0.01, 32],
        [0.999969, 0.999, 32],
        [0.4, 0.1, 32],
    ]


def test_beta2_has_a_floor_and_is_never_raised_to_it():
    assert scaled_beta2(0.999, 256) == 0.95  # 0.774 without
    assert scaled_beta2(0.9, 4) == 0.9
    assert scaled_beta2(0.9, 0.5) == pytest.approx(0.9**0.5)
    assert scaled_decay(0.1, 4, 2) == pytest.approx(0.2)


def test_weight_decay_follows_the_rate_in_use():
    """B is 4 B0, the rate 2 eta0."""

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)

    seen = Recorder(lambda trainer, module: trainer.optimizers[0].param_groups[0]["weight_decay"])
    scaling = AdamScalingCallback(reference=2, rate=0.05)
    fit(Plain(make_optimizer=adamw), loader(batch_size=8), callbacks=[scaling, seen], max_steps=2)
    assert seen.values == [pytest.approx(0.02)] * 2
    with pytest.raises(ConfigError) as refused:
        AdamScalingCallback(2, rate=0.0)
    assert (refused.value.key, refused.value.value) == ("AdamScalingCallback.rate", 0.0)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_adams_time_scales_move_with_the_batch_size(accumulated):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)

    def groups(trainer, module):
        group = trainer.optimizers[0].param_groups[0]
        return *group["betas"], group["weight_decay"]

    seen, scaling = Recorder(groups), AdamScalingCallback(reference=2)
    fit(
        Plain(make_optimizer=adamw),
        loader(batch_size=8 // accumulated),
        callbacks=[scaling, seen],
        max_steps=2,
        accumulate_grad_batches=accumulated,
    )
    assert scaling.factor == 4
    assert seen.values == [pytest.approx((0.9, 0.99**4, 0.04))] * 2


def test_other_optimizers_are_left_as_they_are():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)

    seen = Recorder(lambda trainer, module: trainer.optimizers[0].param_groups[0]["weight_decay"])
    fit(
        Plain(make_optimizer=sgd),
        loader(batch_size=8),
        callbacks=[AdamScalingCallback(2), seen],
        max_steps=1,
    )
    assert seen.values == [0.01]
    with refuses("AdamScalingCallback.reference", 0):
        AdamScalingCallback(0)


def test_calibration_tells_bias_and_coverage(golden):
    def run(real, reached=True):
        limits = {"predicted_steps": [80, 100, 125], "predicted_hours": [0.8, 1, 1.25]}
        return {
            "batch_size": 32,
            "devices": 1,
            "real_devices": 1,
            "reached": reached,
            "steps": real,
            "hours": real / 100,
            **limits,
        }

    # The bias of steps is sqrt(1.1 x 2), and 1 of 3 runs is within the limits.
    runs = {"a": [run(110), run(200)], "b": [run(130, False), run(90, False)]}
    golden.check("advice/calibration.txt", calibrate(runs))
    # The hours of a run on other devices do not count, its steps do.
    other = {**run(50), "devices": 4, "real_devices": 1, "other_hours": 0.1}
    golden.check("advice/calibration-devices.txt", calibrate({"a": [run(110), other]}))
    # A run that diverged, long before the upper limit, is outside.
    ended = {**run(10, False), "diverged": True}
    text = calibrate({"a": [run(110), ended]})
    assert text.count("1 of 2 within") == 2 and "diverged" in text and "ended before" not in text
    golden.check("advice/calibration-empty.txt", calibrate({"a": []}))


def test_waiting_for_a_cpu_is_told_where_linux_tells_it(tmp_path, monkeypatch):
    file = tmp_path / "schedstat"
    monkeypatch.setattr("lit_dps.parallel.process.Path", lambda name: file)
    assert cpu_wait_seconds() == 0.0  # no such file elsewhere
    file.write_text("6646530039 22001559139 2746\n")
    assert cpu_wait_seconds() == pytest.approx(22.001559139)
