"""Step times, noise scales and probes of the advisor, against known truths and public numbers."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.step_model import judge
from lit_dps.advice.next_probe import law_with_prior, rank_probes
from lit_dps.advice.step_time import Link, StepTime, Timed, fit_step_time
from lit_dps.analysis.critical_prior import default_prior, noise_scale_prior
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import Observation
from lit_dps.core.environment import COMPUTED, SOURCES, UNKNOWN, lacks_parts
from lit_dps.core.noise_scale import noise_scale, unbiased_moments
from tests.support.errors import raises_about

SIZES = (4, 8, 16, 32, 64, 128, 256)
C1, C2 = 4e4, 100.0


def test_where_no_law_holds_a_step_takes_what_it_took_and_between_what_its_neighbours_say():
    took = {1: 0.0017, 8: 0.003, 64: 0.017, 512: 0.13, 4096: 2.2}  # the last one leaves the caches
    model = fit_step_time([*(Timed(m, t) for m, t in took.items()), Timed(8, 0.0027)])
    at = [model.at(m).value for m in took]
    assert at == pytest.approx([0.0017, math.sqrt(0.003 * 0.0027), 0.017, 0.13, 2.2])
    law = StepTime(model.a, model.b, model.p, model.misfit, model.local)
    off = {m: math.log(model.at(m).value / law.at(m).value) for m in (64, 181.02, 512, 4096, 8192)}
    assert off[181.02] == pytest.approx((off[64] + off[512]) / 2, rel=1e-3)  # half-way, in log m
    assert off[8192] == pytest.approx(off[4096])
    assert model.misfit > 0.1 and model.at(181.02).high / model.at(181.02).value == pytest.approx(
        math.exp(1.96 * model.misfit)
    )


def test_whole_batches_are_accumulated_in_equal_parts():
    law = StepTime(0.02, 3e-4, 1.0, 0.0, (16, 128), largest=128)
    assert [law.parts(1024, devices) for devices in (1, 2, 3)] == [8, 4, 4]
    assert law.parts(7 * 128 + 1) == 13  # 897 = 3 * 13 * 23 examples
    assert law.parts(1e3 * math.sqrt(2)) == 12


def test_a_line_is_found_as_a_line():
    model = fit_step_time([Timed(m, 0.02 + 3e-4 * m) for m in SIZES])
    assert (model.p, model.a, model.b) == (
        1.0,
        pytest.approx(0.02, rel=1e-4),
        pytest.approx(3e-4, rel=1e-4),
    )
    value, low, high, known = model.at(96)
    assert value == pytest.approx(0.02 + 3e-4 * 96, rel=1e-4)
    assert (low < value < high, known) == (True, "fitted")


def test_a_knee_is_found_as_a_knee():
    model = fit_step_time([Timed(m, max(0.03, 4e-4 * m)) for m in SIZES])
    assert model.p > 8
    assert model.a / model.b == pytest.approx(75, rel=0.05)
    assert model.misfit < 0.02


def test_what_is_flat_so_far_may_be_full_from_there_on():
    model = fit_step_time([Timed(m, 0.03 + 1e-9 * m) for m in (4, 8, 16, 32)])
    value, low, high, known = model.at(128)
    assert known == "extrapolated"
    assert low < 0.03
    assert high > 0.03 * 4


def test_accumulation_repeats_the_device_and_exchanges_once():
    rows = [Timed(m, 0.01 + 1e-4 * m) for m in SIZES]
    rows += [
        Timed(m, 0.01 + 1e-4 * m + 0.005 + 0.001 * math.log2(n / 2), n)
        for m in SIZES
        for n in (2, 3, 4)
    ]
    model = fit_step_time(rows, largest=64)
    assert model.at(64 * 4, 4).value == pytest.approx(0.01 + 64e-4 + 0.006, rel=0.01)
    assert model.at(128 * 4, 4).value == pytest.approx(2 * (0.01 + 64e-4) + 0.006, rel=0.01)
    assert model.at(64 * 8, 8).source == "extrapolated"
    assert model.at(2, 4) is None


@pytest.mark.parametrize("slowed", [1.0, 1.1, 1.25])
def test_an_exchange_that_runs_beside_slows_computing(slowed):
    def together(m: int) -> float:
        return ((slowed * (0.02 + 6e-4 * m)) ** 4 + 0.15**4) ** 0.25

    alone = [Timed(m, 0.02 + 6e-4 * m) for m in (32, 182, 1024)]
    model = fit_step_time([*alone, *(Timed(m, together(m), 8, 2) for m in (32, 1024))], node=4)
    for m in (64, 128, 256, 512):
        assert model.at(8 * m, 8).value == pytest.approx(together(m), rel=0.05)


def test_a_link_is_a_ring_and_marked_predicted():
    link = Link(parameters=25_000_000, bandwidth=1e10, latency=1e-5)
    assert link.seconds(4) == pytest.approx(2 * 3 / 4 * 1e8 / 1e10 + 6e-5)
    model = fit_step_time([Timed(m, 0.02 + 3e-4 * m) for m in SIZES], link=link)
    value, low, high, known = model.at(64 * 4, 4)
    assert value == pytest.approx(0.02 + 3e-4 * 64 + link.seconds(4), rel=1e-3)
    assert known == "predicted"


@pytest.mark.parametrize(
    ("rows", "fact"),
    [([], 2), ([Timed(8, 0.1)], 2), ([Timed(8, 0.1), Timed(16, 0.0)], "seconds=0.0")],
)
def test_step_times_that_say_too_little(rows, fact):
    with raises_about(ValueError, fact):
        fit_step_time(rows)


def test_public_step_times_are_predicted():
    rows = pd.read_csv(Path(__file__).parents[2] / "data" / "step_times.csv")
    rows = rows[
        (rows["set"] == "zeus")
        & (rows["workload"] == "cifar100/shufflenetv2")
        & (rows["hardware"] == "a40")
    ]
    rows = rows.sort_values("local_batch")
    for m in (64, 256, 1024):
        held = rows["local_batch"] == m
        model = fit_step_time(
            [Timed(*x) for x in rows.loc[~held, ["local_batch", "step_time"]].to_numpy()]
        )
        _, low, high, _ = model.at(m)
        assert low < rows.loc[held, "step_time"].item() < high


def scale_of(small, large, sizes):
    squared, variance = unbiased_moments(*sizes, small, large)
    return noise_scale({"squared_gradient": squared, "variance": variance}, sizes[1])


def test_the_noise_scale_of_pairs_is_that_of_their_distribution():
    random = np.random.default_rng(0)
    size, dimension, variance = 0.5, 200, 4.0  # |G|^2 = 0.25, tr(Sigma) = 4: phi = 16

    def squared(batch):
        noise = random.normal(0, math.sqrt(variance / dimension / batch), (400, dimension))
        noise[:, 0] += size
        return (noise**2).sum(axis=1)

    scale = scale_of(squared(8), squared(64), (8, 64))
    assert scale.low < 16 < scale.high
    for is_adaptive, ratio, spread in ((False, 1.0, 0.4), (True, math.exp(0.6), 0.5)):
        prior = noise_scale_prior(scale, is_adaptive)
        assert prior.value == pytest.approx(ratio * scale.value)
        assert prior.log_deviation == pytest.approx(spread, abs=0.1)
    lost = scale_of(random.exponential(1.0, 20) + 1, random.exponential(1.0, 20) + 1, (8, 9))
    assert not lost.resolved
    assert noise_scale_prior(lost) is None


def observed(batch, noise=0.03):
    error = np.random.default_rng(int(batch)).normal(0, noise)
    return Observation(batch, (C1 / batch + C2) * math.exp(error), noise)


def step(batch):
    return 0.01 + 1e-4 * batch


CANDIDATES = [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def test_what_is_asked_at_large_batches_is_probed_at_large_batches():
    law = fit_law([observed(b) for b in (8, 16, 32)])
    worth = rank_probes(law, CANDIDATES[4:], [1024, 2048], step)
    assert worth["batch_size"][0] >= 256  # of 64 to 2048; the law is known at 8 to 32
    assert worth["share"].between(0, 1).all()
    assert worth["worth"].is_monotonic_decreasing
    near = rank_probes(law, [8, 16, 2048], [8, 16], step).set_index("batch_size")
    assert near["gain"].sum() < 0.2 * worth["gain"][0]  # nothing much is left to learn there


def test_nothing_is_ranked_without_a_k():
    with raises_about(ValueError, "K"):
        rank_probes(fit_law([]), CANDIDATES, [64], step)


def test_a_law_with_prior_takes_the_prior_that_the_data_need():
    few = law_with_prior([observed(32)])
    assert few.rests_on_prior and few.prior.value == default_prior(32).value
    enough = law_with_prior([observed(b) for b in (8, 32, 128)])
    assert enough.prior is None
    steps = {4: 900, 8: 300, 16: 290, 32: 80, 64: 75}
    misfit = law_with_prior([Observation(b, k) for b, k in steps.items()])
    assert misfit.beyond is not None and misfit.prior.value == default_prior(64).value
    assert law_with_prior([]).predict([8])["known"].tolist() == ["refused"]


def test_a_probe_far_away_removes_the_error_of_extrapolation_there():
    # The constants are known exactly, so that the error of extrapolation is all that remains.
    law = fit_law([Observation(b, C1 / b + C2) for b in (4, 8, 16, 32, 64, 128, 256)])
    law = replace(law, draws=np.tile([C1, C2], (len(law.draws), 1)))
    gain = rank_probes(law, [64, 4096], [4096], step).set_index("batch_size")["gain"]
    # 4 doublings beyond, with 0.03 each and the tails of few degrees of freedom
    variance = float(((0.03 * 4 * law.deviates) ** 2).mean())
    expected = variance**2 / (0.1**2 + law.error**2 + variance)
    assert gain[4096] == pytest.approx(expected, rel=0.01)
    assert gain[64] == pytest.approx(0, abs=1e-9)


def test_few_noisy_devices_do_not_bend_the_growth_of_the_exchange():
    """The exchange takes 0.2 s on two devices and grows like a ring; one number is 5 % off."""

    def seconds(m: float, devices: int) -> float:
        exchange = 0.2 * (1 + 0.35 * math.log2(devices / 2))
        return ((1.1 * (0.02 + 1e-3 * m)) ** 4 + exchange**4) ** 0.25

    alone = [Timed(m, 0.02 + 1e-3 * m) for m in (16, 64, 256)]
    rows = []
    for devices, error in ((2, 1.0), (3, 1.05), (4, 1.0)):
        rows += [Timed(m, error * seconds(m, devices), devices, devices) for m in (16, 64, 256)]
    model = fit_step_time([*alone, *rows], node=1)
    step = model.at(16 * 64, 16)
    assert step.value == pytest.approx(seconds(64, 16), rel=0.06)
    assert step.low < seconds(64, 16) < step.high and step.source == "extrapolated"


def test_an_exchange_on_other_numbers_of_nodes_has_wide_limits():
    alone = [Timed(m, 0.02 + 1e-3 * m) for m in (16, 64, 256)]
    on_two_nodes = [Timed(m, 0.3 + 1e-3 * m, 4, 2) for m in (16, 64, 256)]
    model = fit_step_time([*alone, *on_two_nodes], node=2)
    near, far = model.at(4 * 64, 4), model.at(4 * 64, 4, nodes=4)
    assert far.value == pytest.approx(near.value, rel=0.01)
    assert far.source == "extrapolated" and near.source == "fitted"
    # A factor of 2 in the exchange is two standard errors.
    assert far.high / far.value > 1.9 > near.high / near.value
    assert model.at(2 * 64, 2) is None, "no exchange within a node was timed"


def test_steps_on_up_to_sixteen_public_devices_follow_from_up_to_four():
    rows = pd.read_csv(Path(__file__).parents[2] / "data" / "step_times.csv")
    found = judge(rows[rows["workload"] == "bert"])
    found = found[found["what"] == "from up to 4 devices to 6 to 16"]
    assert len(found) == 95
    assert (found["error"].abs() < math.log(1.15)).mean() > 0.9


def test_stored_code_is_updated_if_it_lacks_parts_or_another_version_described_it():
    now = {SOURCES: {"a": ["text 4: 1"]}, COMPUTED: {"parameters": ["1", "1", "trial", "cpu"]}}
    assert not lacks_parts({**now, COMPUTED: {}}, {**now, COMPUTED: {"first steps": UNKNOWN}})
    assert not lacks_parts(now, now) and not lacks_parts({**now, "more": 1}, now)
    for stored in (
        {},
        {**now, SOURCES: {}},
        {**now, COMPUTED: {}},
        {**now, SOURCES: {"a": ["text 3: 1"]}},
    ):
        assert lacks_parts(stored, now)
