"""The torture compares results, and a section of its page that was not run stays as it is."""

from __future__ import annotations

import json
from collections import Counter

from tests.torture import changed_results
from tests.torture_faults import Fault
from tests.torture_report import FAULTS, KILLS, Report, page, section_of

UNBROKEN = {"steps": 8, "curve": {"train_loss": [2.5, 2.25]}, "flags": {}, "seconds": 1.0}
TWO_RANKS = UNBROKEN | {"curve": {"train_loss": [2.5, 2.26]}, "flags": {"ranks": 2}}


def test_a_result_is_compared_with_one_on_as_many_ranks():
    """Two ranks add gradients in another order, so they need a reference of their own."""
    unbroken = {1: {("cell", "0"): UNBROKEN}, 2: {("cell", "0"): TWO_RANKS}}
    same = [
        ("cell", "0", json.dumps(result | {"seconds": 9.0})) for result in (UNBROKEN, TWO_RANKS)
    ]
    assert changed_results(same, unbroken) == []
    other = UNBROKEN | {"steps": 12, "curve": TWO_RANKS["curve"]}
    lines = changed_results([("cell", "0", json.dumps(other))], unbroken)
    assert lines == ["cell point 0: curve, steps changed"]
    missing = {key: value for key, value in UNBROKEN.items() if key != "steps"}
    assert changed_results([("cell", "0", json.dumps(missing))], unbroken) == [
        "cell point 0: steps changed"
    ]


def test_a_report_is_good_only_without_a_changed_result():
    report = Report("sqlite", 2, 8, studies=1, on_ranks=3)
    assert report.good and "0 of 32 results changed (3 are from two ranks)" in report.line()
    report.changed = 1
    assert not report.good


def test_a_section_that_was_not_run_stays():
    kills = [Report("sqlite", 2, 8, kills=Counter(KILL=7), studies=2, changed=1, cut_short=3)]
    first = page(kills, [], ["--kills", "7"])
    assert "Not run yet." in section_of(first, FAULTS)
    fault = Fault("the disk is full", tried=3, lost=1, said=["`no space`, exit code 2"])
    second = page([], [fault], ["--kills", "0"], first)
    assert section_of(second, KILLS) == section_of(first, KILLS)
    assert "| the disk is full | 3 | 1 | 0 | 0 | `no space`, exit code 2 |" in second
    assert page([], [fault], ["--kills", "0"], second) == second
    assert "| sqlite: 7 KILL | 7 kills; 3 trials cut short | 0 | 1 of 64 | 0 |" in second
