"""What the benchmark of start-up shows, and that it waits for the right thing."""

from __future__ import annotations

from benchmarks import stack_setup, startup
from benchmarks.numbers import Sample
from tests.support.errors import raises_about


def test_every_start_is_told_over_the_bare_import():
    rows = (startup.Row(startup.BARE, Sample((4.0, 5.0)), Sample((1.0, 1.0))),)
    rows += (startup.Row("`analyze`", Sample((2.0, 2.5)), Sample((0.5, 0.5))),)
    found = startup.Startup(rows, build=Sample((0.004,)), construction=Sample((0.002,)))
    shown = startup.show(found).splitlines()
    assert shown[0] == f"Baseline: `{startup.BARE}`."
    assert shown[-3] == "| `analyze` | 2.25 s (2.00 s to 2.50 s) | x0.500 (x0.500 to x0.500) |"
    assert "4.00 ms of CPU: x2.00" in shown[-1]


def test_the_set_up_of_a_trial_is_told_without_its_constructors():
    row = stack_setup.Row("MLP", 0.9, Sample((0.009, 0.012, 0.008)), Sample((0.002,) * 3))
    shown = stack_setup.show(stack_setup.StackSetup(100, (row,))).splitlines()[-1]
    assert shown.endswith("| 2.00 ms (2.00 ms to 2.00 ms) | 7.00 ms (6.00 ms to 10.0 ms) |")


def test_first_words_are_those_on_the_terminal(tmp_path):
    code = (
        "import sys, time; sys.stderr.isatty() and print('begun', file=sys.stderr, "
        "flush=True); "
        "time.sleep(60)"
    )
    assert startup._first_words(str(tmp_path), ["-c", code]) < 30
    with raises_about(RuntimeError, 3):
        startup._timed(str(tmp_path), ["-c", "raise SystemExit(3)"], {0})
