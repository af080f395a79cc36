"""The step times of a study that is moved or joined by a merge."""

from __future__ import annotations

from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.storage.read import read_study
from lit_dps.storage.run_records import store_step_timing
from tests.unit.storage.test_merge import A, merged, ran, written

TIMING = StepTiming("m1", "2026-11-30", 1, 1, (CellTiming(A, (0.1, 0.2), 0.3, {}),))
OTHER = StepTiming("m2", "2026-12-01", 1, 1, (CellTiming(A, (0.4,), 0.5, {}),))


def test_step_times_are_taken_over_unless_there_are_some(tmp_path):
    new, first, second = (f"sqlite:///{tmp_path}/{i}.db" for i in range(3))
    for url, timing in ((first, TIMING), (second, OTHER)):
        written(url, {A: [ran("incomplete", 64)]})
        store_step_timing(url, "fake", timing)
    merged(new, first)
    assert read_study(new, "fake").step_timing == TIMING
    merged(new, second)
    assert read_study(new, "fake").step_timing == TIMING
    store_step_timing(new, "fake", None)
    merged(new, second)
    assert read_study(new, "fake").step_timing == OTHER
