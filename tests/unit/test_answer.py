"""The answer that every study ends with: times from its trials, the fastest batch size, the rate."""

import math

import pytest

from lit_dps.analysis import StepSeconds, answer_rows, seconds_text, step_seconds, summarize
from lit_dps.analysis.answer import answer_text
from lit_dps.analysis.best_rates import rate_curves, rate_laws
from lit_dps.goal import Goal
from lit_dps.record import StudyRecord
from lit_dps.space import Range
from lit_dps.trial import STACKED, Cell, Series, Status, Trial, TrialResult

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


def record(results):
    return StudyRecord(
        name="made up", workload="digits", goal=GOAL, space=SPACE, batch_sizes=tuple(results), sparsities=(0.0,),
        trials=3, seed=0, goals=(), slack=None, config={}, results={Cell(b): r for b, r in results.items()},
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
    cells = summarize(found)
    table = answer_rows(cells, step_seconds(found))
    return answer_text(found, cells, table, rate_laws(found, rate_curves(found, cells)))


def test_the_start_of_a_trial_is_told_from_its_steps():
    found = step_seconds(study())
    assert [found[Cell(b)].median for b in EACH] == pytest.approx(list(EACH.values()), rel=1e-6)
    assert found[Cell(8)].low == pytest.approx(found[Cell(8)].high)


def test_a_busy_hour_moves_the_median_little():
    found = step_seconds(study(start=0.0, slow=3.0))
    assert [found[Cell(b)].median for b in EACH] == pytest.approx(list(EACH.values()), rel=0.02)
    assert found[Cell(8)].high > 1.5 * found[Cell(8)].median
    assert "the machine was not quiet: a step takes up to x2" in text(study(start=0.0, slow=3.0))
    assert "not quiet" not in text(study())


def test_trials_that_say_nothing_of_a_step_are_left_out():
    assert step_seconds(study(observed={STACKED: 1})) == {}
    assert step_seconds(record({8: [trial(8, 0, None, 5.0, Status.OUTRACED, run=100)]})) == {}
    assert step_seconds(record({8: [trial(8, 0, 100, 0.0)]})) == {}


def test_the_fastest_is_not_the_one_of_least_steps():
    said = text(study()).splitlines()
    assert said[0] == "study made up: which batch size? goal error 0.1, on the machine that ran the trials"
    assert said[2].split() == ["B", "S", "K*", "examples", "to", "goal", "a", "step", "time", "to", "goal"]
    assert [line.split()[2] for line in said[3:8]] == ["112", "64", "48", "28", "24"]
    assert said[5].split() == ["16", "0", "48", "768", "15.5", "ms", "744", "ms", "fastest"]
    assert said[4].endswith("within 10 %")  # 64 x 12 ms = 768 ms
    assert said[9] == "S=0: K* falls up to B = 64, but B = 16 is the fastest here, 744 ms to the goal"
    assert said[10] == "  within 10 % of the best time: B = 8 to 16"
    assert said[11] == "  B = 4 needs the fewest examples, 448"
    assert said[12].startswith("  learning_rate = 0.16 there; learning_rate ~ B^1.00 +- 0.00 from B = 4 to 64")


def test_the_end_of_the_grid_is_told():
    found = record({b: [trial(b, 0, K_STAR[b], 1 + 0.01 * K_STAR[b])] for b in (4, 8)})
    said = text(found)
    assert "B = 8 has the least K* and is the fastest here" in said
    assert "it is the largest one tried, the best may lie beyond" in said


def test_without_seconds_it_tells_the_examples_alone():
    found = record({b: [trial(b, 0, K_STAR[b], 0.0)] for b in (4, 8)})
    assert (
        "S=0: B = 4 needs the fewest examples, 448; no trial tells what a step takes, so that the fastest is not known"
        in text(found)
    )
    assert text(record({4: [trial(4, 0, None, 1.0)]})) == ""


def test_a_k_star_at_the_first_check_is_a_bound():
    found = record({b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 40, 64: 4}.items()})
    said = text(found)
    assert "<= 4 " in said and "<= 256" in said
    assert "B = 64 has the least K* and is the fastest here, at most 1.04 s to the goal" in said
    slower = text(record({b: [trial(b, 0, k, 1 + 0.01 * k)] for b, k in {4: 8, 64: 4}.items()}))
    assert "is the fastest here, at most" in slower


def test_best_rates_leave_out_ends_of_the_range_and_take_the_momentum_in():
    found = record({b: [trial(b, 0, K_STAR[b], 1.0, rate=0.02 * b if b > 4 else 1e-3)] for b in (4, 8, 16)})
    law = rate_laws(found, rate_curves(found, summarize(found)))[Series(0.0)]
    assert (law.range, law.exponent) == ((8, 16), pytest.approx(1.0))
    assert math.isnan(law.error)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0081, "8.10 ms"), (1, "1.00 s"), (42, "42.0 s"), (186, "3.10 min"), (9000, "2.50 h"), (1.04e6, "12.0 days")],
)
def test_times_to_read(seconds, said):
    assert seconds_text(seconds) == said


def test_quartiles_are_ordered():
    found = step_seconds(study(slow=2.0))
    assert all(isinstance(x, StepSeconds) and x.low <= x.median <= x.high for x in found.values())


def test_trials_that_measured_smoothness_do_not_tell_what_a_step_takes():
    measured = {"step": [100], "lipschitz": [1.0], "squared_gradient": [1.0]}
    slow = [trial(4, i, k, START + 100 * EACH[4] * k, smoothness=measured) for i, k in enumerate((112, 224))]
    plain = [trial(8, i, k, START + EACH[8] * k) for i, k in enumerate((64, 128))]
    found = step_seconds(record({4: slow, 8: plain}))
    assert Cell(4) not in found and found[Cell(8)].median == pytest.approx(EACH[8])
