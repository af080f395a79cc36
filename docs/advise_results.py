"""What `lit-dps advise` is worth on the workloads of configs/advice: targets, and values from results.

`advise_measuring.py` stores the results, and `advise_calibration.py` writes the page.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "advice"
RESULTS = ROOT / "docs" / "advise-calibration.json"
PAGE = ROOT / "docs" / "advise-calibration.md"
sys.path.insert(0, str(ROOT))

COVERAGE = 0.8
FAR = 8  # a batch size above this times B0 is not part of the target of the error
# The targets: cost in trainings on a device that is not full at B0, and on one that is; median
# error of log K; coverage; mean time lost.
MAX_TRAININGS = (3, 5)
MAX_ERROR = 0.15
COVERAGE_RANGE = (0.7, 0.9)
MAX_TIME_LOST = 0.1
# The distance of the quartiles of a normal distribution, and the standard error of the median of n
# of its draws times sqrt(n), in standard deviations.
QUARTILES = 1.349
MEDIAN_ERROR = 1.253
QUIET_SHARE = 0.05  # of the timed steps that a process on a quiet machine waits for a CPU


class Workload(NamedTuple):
    """A workload of configs/advice.

    Attributes:
        name: The configuration of `advise`, and the name of its study.
        what: What it trains, for the page.
    """

    name: str
    what: str

    @property
    def study(self) -> str:
        """The configuration of the exhaustive study."""
        return f"{self.name}-exhaustive"


WORKLOADS = (
    Workload("mnist-simple-cnn", "Simple-CNN, MNIST"),
    Workload("cifar-10-resnet-norm", "ResNet, CIFAR-10 (JPEG copies), momentum"),
    Workload("text-transformer", "transformer, text"),
    Workload("tabular", "MLP, table, AdamW and cosine"),
    Workload("norm-images", "ResNet, small images, SGD"),
    Workload("characters", "transformer, characters, AdamW"),
    Workload("pairs", "contrastive pairs, Adam"),
    Workload("muon", "MLP, Muon and AdamW"),
    Workload("stream", "convolution, stream, SGD"),
)


def read_results() -> dict[str, Any]:
    """Return the stored results by the name of the workload; {} without any."""
    if not RESULTS.exists():
        return {}
    return json.loads(RESULTS.read_text())


class Comparison(NamedTuple):
    """A predicted K beside the median over seeds of the exhaustive study.

    Attributes:
        batch_size: Examples of a step.
        ratio: The batch size over the user's.
        predicted, low, high: K with its 80 % interval.
        median, least, most: Steps of the best rate over seeds; `most` is None if a run missed the
            goal, and both ends are None if they were not recorded.
    """

    batch_size: int
    ratio: float
    predicted: float
    low: float
    high: float
    median: float
    least: float | None
    most: float | None

    @property
    def log_error(self) -> float:
        """The log of the predicted over the measured K."""
        return math.log(self.predicted / self.median)

    @property
    def is_covered(self) -> bool:
        """Whether the measured K is in the interval."""
        return self.low <= self.median <= self.high


def comparisons(result: dict[str, Any]) -> list[Comparison]:
    """Return predicted and measured K at each batch size of the exhaustive study."""
    measured_rows = {row["batch_size"]: row for row in result["exhaustive"]}
    rows = []
    for size, low, middle, high in result["predicted"]:
        row = measured_rows[size]
        if row["median"] is None:
            continue
        ratio = size / result["pilot_size"]
        seeds = (row["median"], row["least"], row["most"])
        rows.append(Comparison(size, ratio, middle, low, high, *seeds))
    return rows


def near_comparisons(results: dict[str, Any]) -> list[Comparison]:
    """Return the comparisons of all workloads up to 8 times the user's batch size."""
    rows = []
    for result in results.values():
        rows += [each for each in comparisons(result) if each.ratio <= FAR]
    return rows


def cost_in_trainings(result: dict[str, Any]) -> float:
    """Return the device time of all runs of `advise` over that of the user's run in `fit`."""
    return sum(run[2] for run in result["runs"]) / result["training_seconds"]


def step_seconds(result: dict[str, Any], batch_size: int) -> float:
    """Return the time of a step with its checks: that of the study, or on a line through two."""
    rows = sorted(result["exhaustive"], key=lambda row: row["batch_size"])
    sizes = [row["batch_size"] for row in rows]
    # The first line holds below the batch sizes of the study, and the last one above them.
    end = min(max(bisect.bisect_left(sizes, batch_size), 1), len(rows) - 1)
    low = rows[end - 1]
    high = rows[end]
    width = high["batch_size"] - low["batch_size"]
    share = (batch_size - low["batch_size"]) / width
    return low["step_seconds"] + share * (high["step_seconds"] - low["step_seconds"])


def times_to_goal(result: dict[str, Any], steps: str = "median") -> dict[int, float]:
    """Return seconds to the goal by batch size: steps of the study times a step with checks.

    Args:
        result: The result of a workload.
        steps: The median over seeds, or "by_law" of all medians.
    """
    times = {}
    for row in result["exhaustive"]:
        if row[steps] is not None:
            times[row["batch_size"]] = row[steps] * row["step_seconds"]
    return times


def time_lost(result: dict[str, Any], steps: str = "median") -> float | None:
    """Return the time lost by the recommendation, as a share of the least time of the study.

    Args:
        result: The result of a workload.
        steps: As in `times_to_goal`.

    Returns:
        None if nothing is recommended. At a batch size without a median, the steps are those of
        `fit`; None if most of its runs missed the goal. The loss is 0 if it is faster than the
        study's best.
    """
    if result["recommendation"] is None:
        return None
    times = times_to_goal(result, steps)
    size = result["recommendation"]["batch_size"]
    seconds = times.get(size)
    if seconds is None and steps == "by_law":
        seconds = steps_by_law(result, size) * step_seconds(result, size)
    elif seconds is None:
        seconds = _seconds_of_fit(result)
    if math.isinf(seconds):
        return None
    return seconds / min(seconds, *times.values()) - 1


def time_lost_by_study(result: dict[str, Any]) -> float:
    """Return the time lost at the batch size that is fastest by the law through all medians.

    No advice knows this law. The loss shows how far single medians are from a smooth curve.
    """
    by_law = times_to_goal(result, "by_law")
    times = times_to_goal(result)
    fastest = min(times, key=by_law.__getitem__)
    return times[fastest] / min(times.values()) - 1


def steps_by_law(result: dict[str, Any], batch_size: int) -> float:
    """Return c1 / B + c2 at any batch size, by the law's steps at the ends of the study."""
    first, last = result["exhaustive"][0], result["exhaustive"][-1]
    c1 = (first["by_law"] - last["by_law"]) / (1 / first["batch_size"] - 1 / last["batch_size"])
    return last["by_law"] + c1 * (1 / batch_size - 1 / last["batch_size"])


def _seconds_of_fit(result: dict[str, Any]) -> float:
    """Return the median seconds of the recommended runs; infinite if most missed the goal."""
    steps = [run["steps"] if run["reached"] else math.inf for run in result["fit"]]
    return statistics.median(steps) * step_seconds(result, result["recommendation"]["batch_size"])


def time_lost_by_fit(result: dict[str, Any]) -> float | None:
    """Return the time lost by following the recommendation: by the runs of `fit` there.

    The rate of the recommendation may need other steps than the best rate of the study.

    Returns:
        None if nothing is recommended, or if most runs of `fit` missed the goal.
    """
    if result["recommendation"] is None:
        return None
    seconds = _seconds_of_fit(result)
    if math.isinf(seconds):
        return None
    return seconds / min(seconds, *times_to_goal(result).values()) - 1
