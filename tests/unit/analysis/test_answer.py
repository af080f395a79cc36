"""The answer that every study ends with: times of steps, the batch sizes that may be the fastest,
the rate."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pandas as pd
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.answer import answer_rows, probabilities_of_fastest
from lit_dps.analysis.law_verdict import Trust
from lit_dps.analysis.rates import rate_curves, rate_laws
from lit_dps.analysis.step_seconds import StepSeconds, step_seconds
from lit_dps.analysis.summary import summarize
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.text import format_duration, format_interval
from lit_dps.core.trial import SPARSE_KERNELS, STACKED, Cell, Series, Status, Trial, TrialResult
from lit_dps.core.unit import EXAMPLES
from lit_dps.report.answer import answer_lines
from tests.support.texts import answer_text

SPACE = {"model.learning_rate": Range(1e-3, 10.0, "log")}
GOAL = Goal(0.1, check_interval=4, max_steps=400)
K_STAR = {4: 112, 8: 64, 16: 48, 32: 28, 64: 24}
EACH = {4: 0.010, 8: 0.012, 16: 0.0155, 32: 0.030, 64: 0.060}
START = 2.0


def trial(batch, point, steps, seconds, status=None, rate=0.1, run=None, **kw):
    return TrialResult(
        trial=Trial(Cell(batch), point, {"model.learning_rate": rate}),
        status=status or (Status.INCOMPLETE if steps is None else Status.COMPLETE),
        steps=steps,
        curve={"step": [run or steps or 400], "val_error": [0.5], "train_loss": [1.0]},
        seconds=seconds,
        **kw,
    )


def record(results, trials=3):
    return StudyRecord(
        name="made up", workload="digits", goal=GOAL, space=SPACE, batch_sizes=tuple(results), sparsities=(0.0,),
        trials=trials, seed=0, goals=(), race_factor=None, config={}, results={Cell(b): r for b, r in results.items()},
        running={Cell(b): 0 for b in results},
    )  # fmt: skip


def study(start=START, slow=1.0, **kw):
    """Three trials a cell; the third is on a machine `slow` times as busy."""
    return record(
        {
            b: [
                trial(b, 0, k, start + k * EACH[b], rate=0.01 * b, **kw),
                trial(b, 1, 2 * k, start + 2 * k * EACH[b], **kw),
                trial(b, 2, None, start + 400 * EACH[b] * slow, **kw),
            ]
            for b, k in K_STAR.items()
        }
    )


def text(found):
    """Return the answer by K* itself."""
    analysis = Analysis(found)
    analysis.answer = answer_rows(found, analysis.cells, step_seconds(found))
    return answer_text(analysis)


def examples_at_the_largest_batch(found):
    return answer_rows(found, summarize(found), {})["examples"].iloc[-1]


def test_the_examples_to_the_goal_are_counted():
    found = study()
    warm_up = {"schedule": "doubling", "options": {"start": 0.25, "steps": 10}}
    by_schedule = dataclasses.replace(found, config={"batch": warm_up})
    # 10 steps of 16, 10 steps of 32, and the last 4 steps of 64 examples.
    assert examples_at_the_largest_batch(by_schedule) == 10 * 16 + 10 * 32 + 4 * 64
    law = Analysis(by_schedule).law(Series())
    assert (law.fit, law.verdict.trust) == (None, Trust.MEASURED)
    assert law.exact_k == K_STAR
    assert examples_at_the_largest_batch(found) == 24 * 64
    # A trial that has counted its examples, because its last step was short.
    best = found.results[Cell(64)][0]
    counted = dataclasses.replace(best, curve={**best.curve, "examples": [24 * 64 - 5]})
    results = {**found.results, Cell(64): [counted, *found.results[Cell(64)][1:]]}
    counted = dataclasses.replace(found, results=results)
    assert examples_at_the_largest_batch(counted) == 24 * 64 - 5


def test_k_star_in_examples_is_a_whole_number_of_steps():
    # 253 / 4 * (4 * 64 / 253) is not 64 in floating-point numbers.
    results = {}
    for batch_size, steps, short_by in ((4, 112, 4), (8, 64, 3), (16, 48, 0), (4096, 28, 1)):
        best = trial(batch_size, 0, steps, 2.0, unit=EXAMPLES)
        curve = {"step": [steps - 4, steps], "val_error": [0.5, 0.1], "train_loss": [1.0, 1.0]}
        curve["examples"] = [batch_size * step - short_by for step in curve["step"]]
        best = dataclasses.replace(best, curve=curve)
        results[batch_size] = [best]
    found = dataclasses.replace(record(results), goal=dataclasses.replace(GOAL, unit="examples"))
    answer = Analysis(found).answer
    assert set(answer["why_not_law"]) != {""}  # these K* follow no law
    assert answer["steps"].tolist() == [112, 64, 48, 28]


def test_where_the_batch_grows_times_are_by_the_clock_of_the_runs():
    """A trial to the budget of 400 steps takes 0.06 s a step, and the trial of K* less."""

    def timed(steps, seconds):
        return {"steps": steps, "training": seconds, "checks": 1, "checking": 0.1}

    results = {}
    for b, k in K_STAR.items():
        best = trial(b, 0, k, 9.0, timed=timed(k, 1.0 + 1 / b), rate=0.01 * b)
        results[b] = [best, trial(b, 1, None, 30.0, timed=timed(400, 24.0))]
    # The trial of B = 16 was resumed, and the checks of B = 32 have recorded the seconds.
    results[16][0] = dataclasses.replace(results[16][0], timed=timed(8, 0.5))
    curve = {**results[32][0].curve, "seconds": [0.7]}
    results[32][0] = dataclasses.replace(results[32][0], curve=curve)
    constant = record(results)
    warm_up = {"schedule": "doubling", "options": {"start": 0.25, "steps": 10}}
    found = Analysis(dataclasses.replace(constant, config={"batch": warm_up}))
    assert found.step_seconds == {} and len(step_seconds(constant)) == 5
    answer = found.answer
    assert answer["seconds"].tolist() == pytest.approx(
        [1.25, 1.125, math.nan, 0.7, 1 + 1 / 64], nan_ok=True
    )
    assert answer["step_seconds"].isna().all() and answer["seconds_low"].isna().all()
    assert answer["fastest"].tolist() == [False, False, False, True, False]
    assert answer["steps"].tolist() == list(K_STAR.values())
    assert "clock of the runs" in answer_text(found)
    assert found.rate_laws == {Series(0.0): None} and not len(found.prices)
    assert found.rates["scaled_from"].isna().all() and found.rates["linear"].isna().all()
    assert Analysis(constant).rate_laws[Series(0.0)].exponent == pytest.approx(1)

    repeats = {}
    for b, k in K_STAR.items():
        runs = []
        for i, (steps, seconds) in enumerate(((k, 3.0), (2 * k, 1.0), (3 * k, 2.5)), 1):
            run = trial(b, 0, steps, 9.0, timed=timed(steps, seconds))
            runs.append(dataclasses.replace(run, trial=dataclasses.replace(run.trial, repeat=i)))
        repeats[Cell(b)] = runs
    plan = {"plan": RepeatPlan(3), "repeats": repeats}
    answer = Analysis(dataclasses.replace(found.record, **plan)).answer
    assert answer["steps"].tolist() == [2 * k for k in K_STAR.values()]
    assert answer["seconds"].tolist() == [2.5] * 5
    examples = [found.record.examples_of(Cell(b), 2 * k) for b, k in K_STAR.items()]
    assert answer["examples"].tolist() == examples


def test_the_start_of_a_trial_is_told_from_its_steps():
    found = step_seconds(study())
    assert [found[Cell(b)].median for b in EACH] == pytest.approx(list(EACH.values()), rel=1e-6)
    assert found[Cell(8)].low == pytest.approx(found[Cell(8)].high)


def test_a_busy_hour_moves_the_median_little(golden):
    found = step_seconds(study(start=0.0, slow=3.0))
    assert [found[Cell(b)].median for b in EACH] == pytest.approx(list(EACH.values()), rel=0.02)
    assert found[Cell(8)].high > 1.5 * found[Cell(8)].median
    golden.check("answer/busy-hour.txt", text(study(start=0.0, slow=3.0)))


def test_the_answer_lists_the_machines_if_there_are_several(golden):
    def on(*hardware):
        return text(
            dataclasses.replace(
                study(), environments=tuple({"python": "3.11", **each} for each in hardware)
            )
        )

    one, other = {"hardware": "Xeon, 2 cores"}, {"hardware": "EPYC, 2 cores"}
    assert on() == on(one).replace("on Xeon, 2 cores", "on the machine that ran the trials")
    assert on(one) == on(one, one)
    _, *shared = on().splitlines()
    added = []
    for machines in ((one, other), (one, {}), ({},)):
        _, *lines = on(*machines).splitlines()
        added.append([line for line in lines if line not in shared])
    # Of hardware that is not stored, one machine may be several.
    assert [len(lines) for lines in added] == [1, 1, 1]
    golden.check("answer/machines.txt", "\n\n".join(lines[0] for lines in added) + "\n")


def test_trials_that_say_nothing_of_a_step_are_left_out():
    assert step_seconds(study(flags={STACKED: 1})) == {}
    assert step_seconds(study(flags={SPARSE_KERNELS: 1})) == {}
    assert step_seconds(record({8: [trial(8, 0, None, 5.0, Status.OUTRACED, run=100)]})) == {}
    assert step_seconds(record({8: [trial(8, 0, 100, 0.0)]})) == {}


def test_the_fastest_is_not_the_one_of_least_steps(golden):
    answer = text(study())
    rows = [line.split() for line in answer.splitlines()[3:8]]
    assert [row[1] for row in rows] == ["112", "64", "48", "28", "24"]
    assert rows[2] == ["16", "48", "768", "15.5", "ms", "744", "ms", "0.160", "fastest"]
    # B = 8 takes 64 x 12 ms = 768 ms, about as long as B = 16.
    golden.check("answer/plain.txt", answer)


def test_the_answer_says_that_the_best_may_lie_beyond_the_grid(golden):
    found = record({b: [trial(b, 0, K_STAR[b], 1 + 0.01 * K_STAR[b])] for b in (4, 8)}, trials=2)
    golden.check("answer/end-of-grid.txt", text(found))


def test_without_seconds_the_answer_has_the_examples_alone(golden):
    found = record({b: [trial(b, 0, K_STAR[b], 0.0)] for b in (4, 8)}, trials=2)
    golden.check("answer/no-seconds.txt", text(found))
    assert answer_lines(Analysis(record({4: [trial(4, 0, None, 1.0)]}))) == []


def test_a_k_star_at_the_first_check_is_a_bound(golden):
    found = record({b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 40, 64: 4}.items()}, trials=2)
    golden.check("answer/bound.txt", text(found))
    found = record({b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 8, 64: 4}.items()}, trials=2)
    golden.check("answer/bound-tied.txt", text(found))


def test_best_rates_leave_out_ends_of_the_range_and_take_the_momentum_in():
    found = record(
        {b: [trial(b, 0, K_STAR[b], 1.0, rate=0.02 * b if b > 4 else 1e-3)] for b in (4, 8, 16)},
        trials=1,
    )
    law = rate_laws(found, rate_curves(found, summarize(found)))[Series(0.0)]
    assert (law.range, law.exponent) == ((8, 16), pytest.approx(1.0))
    assert law.error == pytest.approx(
        math.sqrt(2)
    )  # the spacing of the two rates, log 2, over that of log B
    (curve,) = rate_curves(found, summarize(found))
    assert curve.at(11, {}) == pytest.approx(0.22) and curve.at(4, {}) is None


def test_where_momentum_is_searched_the_rate_of_the_law_is_that_of_a_momentum():
    results = {
        b: [
            dataclasses.replace(
                t := trial(b, 0, K_STAR[b], 1.0), trial=dataclasses.replace(t.trial, params=params)
            )
        ]
        for b, params in {
            8: {"model.learning_rate": 0.1, "model.momentum": 0.5},
            32: {"model.learning_rate": 0.04, "model.momentum": 0.9},
        }.items()
    }
    found = record(results, trials=1)
    found = dataclasses.replace(found, space={**SPACE, "model.momentum": Range(0.1, 0.99)})
    (curve,) = rate_curves(found, summarize(found))
    assert curve.law.name == "learning_rate / (1 - momentum)"
    assert curve.law.at(32) == pytest.approx(0.4)
    assert curve.at(16, {"model.momentum": 0.75}) == pytest.approx(0.25 * (0.2 * 0.4) ** 0.5)


def test_quartiles_are_ordered():
    found = step_seconds(study(slow=2.0))
    assert all(isinstance(x, StepSeconds) and x.low <= x.median <= x.high for x in found.values())


def test_trials_that_measured_smoothness_do_not_tell_what_a_step_takes():
    measured = {"step": [100], "lipschitz": [1.0], "squared_gradient": [1.0]}
    slow = [
        trial(4, i, k, START + 100 * EACH[4] * k, readings={"lipschitz": measured})
        for i, k in enumerate((112, 224))
    ]
    plain = [trial(8, i, k, START + EACH[8] * k) for i, k in enumerate((64, 128))]
    found = step_seconds(record({4: slow, 8: plain}))
    assert Cell(4) not in found and found[Cell(8)].median == pytest.approx(EACH[8])


def with_law(found):
    analysis = Analysis(found)
    return analysis.answer.set_index("batch_size"), answer_text(analysis)


NOISE = {4: 1.0, 8: 1.0, 16: 0.8, 32: 1.2, 64: 0.85, 128: 1.1}  # of K* about its law


def noisy(noise=NOISE):
    """K* = 800 / B + 20 but for its noise; a step takes 10 ms and 0.3 ms an example."""
    steps = {b: 4 * round((800 / b + 20) * x / 4) for b, x in noise.items()}
    each = {b: 0.01 + 3e-4 * b for b in steps}
    return record(
        {
            b: [trial(b, i, k + 8 * i, (k + 8 * i) * each[b]) for i in range(3)]
            for b, k in steps.items()
        }
    )


def test_times_follow_the_law_where_single_k_stars_scatter(golden):
    table, answer = with_law(noisy())
    truth = {b: (800 / b + 20) * (0.01 + 3e-4 * b) for b in NOISE}
    raw = (table["k_star"] * table["step_seconds"]).astype(float)
    assert raw.idxmin() == 64 and min(truth, key=truth.get) == 32  # by luck
    assert table["seconds"].astype(float).idxmin() == 32 and table.loc[32, "fastest"]
    assert table["seconds"].tolist() == pytest.approx(list(truth.values()), rel=0.15)
    assert all(low < truth[b] for b, low in table["seconds_low"].items())
    assert all(truth[b] < high for b, high in table["seconds_high"].items())
    assert (table["k_star"] != table["steps"].round()).any() and set(table["steps_of"]) == {"K*"}
    time = format_interval(*table.loc[32, ["seconds", "seconds_low", "seconds_high"]])
    assert f"B = 32 needs {time} " in answer
    golden.check("answer/law.txt", answer)


def test_examples_follow_the_law_as_times_do():
    table, answer = with_law(noisy({**NOISE, 8: 0.8}))
    raw = table["k_star"].astype(float) * table.index
    assert raw.idxmin() == 8  # by luck
    assert table["fewest"].idxmax() == 4 and "B = 4 needs the fewest examples" in answer
    truth = [800 + 20 * b for b in NOISE]
    assert table["examples"].tolist() == pytest.approx(truth, rel=0.15)
    assert (table["examples"] / table.index).tolist() == pytest.approx(table["steps"].tolist())


def test_times_follow_k_star_where_its_law_is_refused(golden):
    table, answer = with_law(noisy({4: 1.0, 8: 3.0, 16: 0.8, 32: 4.0, 64: 1.0}))
    assert table["steps"].tolist() == table["k_star"].tolist()
    assert table["why_not_law"].str.contains("K rises").all()
    golden.check("answer/law-refused.txt", answer)


def test_a_bound_stays_a_bound_beside_a_law():
    found = noisy({8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0})
    found.results[Cell(512)] = [trial(512, 0, 4, 4.0)]
    table, said = with_law(record({c.batch_size: r for c, r in found.results.items()}))
    assert table.loc[512, "steps"] == 4 and math.isnan(table.loc[512, "seconds_low"])
    assert table.loc[512, "why_not_law"] == "K is an upper bound there"
    assert "<= 4.00 s" in said


def test_repeats_on_fresh_seeds_are_what_one_run_takes(golden):
    found = noisy({b: 0.7 for b in NOISE})
    repeats = {
        c: [dataclasses.replace(trial(c.batch_size, 0, 4 * round((800 / c.batch_size + 20) * x / 4), 1.0),
            trial=dataclasses.replace(r[0].trial, repeat=i)) for i, x in enumerate((0.9, 1.0, 1.1), 1)]
        for c, r in found.results.items()
    }  # fmt: skip
    table, answer = with_law(
        dataclasses.replace(found, plan=RepeatPlan(3, 1, None), repeats=repeats)
    )
    assert table["steps"].tolist() == pytest.approx([800 / b + 20 for b in NOISE], rel=0.05)
    assert table["k_star"].tolist() == pytest.approx([0.7 * (800 / b + 20) for b in NOISE], rel=0.1)
    golden.check("answer/repeats.txt", answer)


def timed(found, every=4, check=0.5):
    """The same trials, each with seconds of its steps and, apart from them, of a check every few
    steps."""
    results = {}
    for cell, trials in found.results.items():
        results[cell] = []
        for result in trials:
            steps = result.steps_run
            seconds = {"steps": steps, "training": steps * EACH[cell.batch_size]}
            seconds |= {"checks": steps // every, "checking": steps // every * check}
            results[cell].append(dataclasses.replace(result, timed=seconds))
    return dataclasses.replace(found, results=results)


def test_checks_of_the_goal_do_not_decide_which_batch_size_is_the_fastest():
    # A check of 0.5 s every 4 steps costs ten times as much as the steps: with it B = 64 would win.
    table = Analysis(timed(study())).answer.set_index("batch_size")
    assert table["step_seconds"].to_dict() == pytest.approx(EACH)
    assert table["check_seconds"].tolist() == pytest.approx([0.5] * 5)
    seconds = table["steps"] * table["step_seconds"].astype(float)
    assert table["seconds"].tolist() == pytest.approx(seconds.tolist())
    assert table["seconds"].astype(float).idxmin() == 16
    with_checks = seconds + table["steps"] / 4 * 0.5
    assert with_checks.idxmin() == 64
    assert table["validation_seconds"].isna().all() and set(table["timing"]) == {"trials"}


def test_validation_has_a_column_at_the_interval_of_the_user(golden):
    analysis = Analysis(timed(study()), validate_every=10)
    table = analysis.answer.set_index("batch_size")
    validations = {b: math.ceil(steps / 10) for b, steps in table["steps"].items()}
    assert table["validation_seconds"].tolist() == pytest.approx(
        [0.5 * n for n in validations.values()]
    )
    without = Analysis(timed(study())).answer.set_index("batch_size")
    assert table["seconds"].tolist() == without["seconds"].tolist()
    assert without["total_seconds"].tolist() == without["seconds"].tolist()
    totals = table["seconds"] + table["validation_seconds"].astype(float)
    assert table["total_seconds"].tolist() == pytest.approx(totals.tolist())
    # The limits have the validations of the limits of the steps.
    checks = 0.5 * math.ceil(table.loc[16, "steps_high"] / 10)
    assert table.loc[16, "total_high"] == pytest.approx(table.loc[16, "seconds_high"] + checks)
    assert (without["fastest"].idxmax(), table["fastest"].idxmax()) == (16, 32)
    answer = answer_text(analysis)
    total = table.loc[32, "seconds"] + table.loc[32, "validation_seconds"]
    assert format_duration(0.5 * validations[16]) in answer
    low, high = table.loc[32, "total_low"], table.loc[32, "total_high"]
    assert f"B = 32 needs {format_interval(total, low, high)}" in answer
    golden.check("answer/validation.txt", answer)


def test_the_answer_says_which_times_include_checks(golden):
    # Those of `study`, which have no times of checks, include them: answer/plain.txt.
    golden.check("answer/checks-apart.txt", text(timed(study())))
    older = timed(study())
    older.results[Cell(64)] = study().results[Cell(64)]
    golden.check("answer/checks-apart-in-some.txt", text(older))


def test_times_of_trials_are_of_the_size_of_the_best_one():
    found = timed(study())
    found = dataclasses.replace(found, space={**SPACE, "model.width": Choices([64, 256])})
    for cell, (best, *others) in found.results.items():
        trials = [with_params(best, width=256)]
        for other in others:
            # A narrow network is ten times as fast.
            fast = {**other.timed, "training": other.timed["training"] / 10}
            trials.append(with_params(dataclasses.replace(other, timed=fast), width=64))
        found.results[cell] = trials
    seconds = step_seconds(found)
    assert {cell.batch_size: each.median for cell, each in seconds.items()} == pytest.approx(EACH)


def with_params(result, width):
    params = {**result.trial.params, "model.width": width}
    return dataclasses.replace(result, trial=dataclasses.replace(result.trial, params=params))


def with_timing(found, rounds):
    """The same study with step times that were measured alone, by batch size."""
    cells = tuple(CellTiming(Cell(b), tuple(times), 0.25) for b, times in rounds.items())
    return dataclasses.replace(
        found, step_timing=StepTiming("Xeon, 2 cores", "2026-11-27", 1, 1, cells)
    )


def test_a_quiet_timing_takes_the_place_of_the_trials_times(golden):
    rounds = {b: [1e-3 * x for x in (9, 10, 11)] for b in K_STAR}
    found = with_timing(timed(study()), rounds)
    seconds = step_seconds(found)
    assert {cell.batch_size: each.median for cell, each in seconds.items()} == pytest.approx(
        dict.fromkeys(K_STAR, 0.01)
    )
    assert seconds[Cell(8)].low == pytest.approx(0.0095) and seconds[Cell(8)].check == 0.25
    golden.check("answer/quiet-timing.txt", text(found))


def test_an_incomplete_quiet_timing_is_not_mixed_with_times_of_trials():
    rounds = {b: [0.01, 0.01, 0.01] for b in K_STAR if b != 64}
    seconds = step_seconds(with_timing(timed(study()), rounds))
    assert {cell.batch_size: each.median for cell, each in seconds.items()} == pytest.approx(EACH)
    assert {each.source for each in seconds.values()} == {"trials"}


def rows_with(limits):
    """Rows of an answer with seconds and their 95 % limits."""
    columns = ("total_seconds", "total_low", "total_high")
    return pd.DataFrame([dict(zip(columns, each, strict=True)) for each in limits])


def test_the_verdict_holds_every_batch_size_that_may_be_the_fastest():
    # Log-normal times with equal spread s: P(second < first) = Phi(-d / (s sqrt 2)).
    spread, distance = 0.2, 0.3
    wide = math.exp(1.96 * spread)
    limits = [(x, x / wide, x * wide) for x in (1.0, math.exp(distance))]
    probability = probabilities_of_fastest(rows_with(limits))
    expected = NormalDist().cdf(-distance / (spread * math.sqrt(2)))
    assert probability[1] == pytest.approx(
        expected, abs=0.02
    ) and probability.sum() == pytest.approx(1)
    # A bound of 4 s is below 1 s with a probability of a quarter.
    bound = [(1.0, 1 / 1.001, 1.001), (4.0, None, None)]
    probability = probabilities_of_fastest(rows_with(bound), np.array([False, True]))
    assert probability.tolist() == pytest.approx([0.75, 0.25], abs=0.02)
    apart = [(x, x / 1.02, x * 1.02) for x in (1.0, 1.2, 1.4)]
    assert probabilities_of_fastest(rows_with(apart)).tolist() == [1, 0, 0]


def test_busy_rounds_leave_several_batch_sizes_and_quiet_ones_a_winner(golden):
    found = noisy(dict.fromkeys((4, 8, 16, 32, 64, 128), 1.0))
    each = {b: 0.01 * b**0.8 for b in NOISE}
    quiet = {b: [x * 0.999, x, x * 1.001] for b, x in each.items()}
    busy = {b: [x / 3, x, x * 3] for b, x in each.items()}
    winner, _ = with_law(with_timing(found, quiet))
    tied, answer = with_law(with_timing(found, busy))
    assert winner["tied"].sum() < tied["tied"].sum()
    assert tied["tied"].tolist() == (tied["probability"] >= 0.05).tolist()
    assert (winner["busy"].any(), tied["busy"].all()) == (False, True)
    assert set(tied["timing"]) == {"after the study"}
    golden.check("answer/busy-rounds.txt", answer)
    assert (tied["seconds_high"] / tied["seconds"] > 3).all()
