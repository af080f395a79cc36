"""The page of the torture: a section that was not run stays as it is."""

from __future__ import annotations

from collections import Counter

from tests.torture_faults import Fault
from tests.torture_report import FAULTS, KILLS, Report, page, section_of


def test_a_section_that_was_not_run_stays():
    kills = [Report("sqlite", 2, 8, kills=Counter(KILL=7), studies=2, identical=2, cut_short=3)]
    first = page(kills, [], ["--kills", "7"])
    assert "Not run yet." in section_of(first, FAULTS)
    fault = Fault("the disk is full", tried=3, lost=1, said=["`no space`, exit code 2"])
    second = page([], [fault], ["--kills", "0"], first)
    assert section_of(second, KILLS) == section_of(first, KILLS)
    assert "| the disk is full | 3 | 1 | 0 | 0 | `no space`, exit code 2 |" in second
    assert page([], [fault], ["--kills", "0"], second) == second
    assert "| sqlite: 7 KILL | 7 kills; 3 trials cut short | 0 | 0 of 2 tables | 0 |" in second
