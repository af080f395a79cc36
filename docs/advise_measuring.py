"""Measures what `lit-dps advise` is worth; `advise_calibration.py measure` calls it.

The exhaustive study of each workload is read from the folder mlruns, else from the stored results.
If both have none, the study runs. Then `advise` runs in a new folder, and `fit` on three seeds.
Steps are timed at all batch sizes of a study in turn, so that their times are of one day.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest.mock import patch

from advise_results import CONFIGS, COVERAGE, RESULTS, ROOT, WORKLOADS, Workload, read_results

SEEDS = (1, 2, 3)
ROUNDS = 3  # of timing all batch sizes; a single time is 10 % off on a quiet machine
TIMED_SECONDS = 2.0  # of steps at each batch size in each round
MIN_TIMED_STEPS = 5
MAX_TIMED_STEPS = 400
# What advise prints before the user's run.
ANNOUNCED = re.compile(
    r"advice takes your run, and for runs at larger batch sizes at most about ([\d.]+) times"
)


def measure(names: list[str]) -> None:
    """Measure some workloads, all without names, and store each result when it is there."""
    for workload in WORKLOADS:
        if names and workload.name not in names:
            continue
        print(f"{workload.name}: measuring", flush=True)
        results = read_results()
        results[workload.name] = measured(workload)
        write_results(results)


def measured(workload: Workload) -> dict[str, Any]:
    """Return the exhaustive study of a workload, the advice, and the runs of `fit`."""
    study = read_study(workload) or stored_study(workload)
    if not study:
        run_command("study", "--config", str(CONFIGS / f"{workload.study}.yaml"))
        study = read_study(workload)
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        output, messages = run_here("advice", workload, folder, *sizes_of(study))
    advice = json.loads(output)
    (announced,) = ANNOUNCED.findall(messages)
    set_step_seconds(study, advice.pop("step_seconds"))
    return {
        **advice,
        **study,
        "seconds": advice["ended"] - began,
        "announced": 1 + float(announced),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
    }


def read_studies(names: list[str]) -> None:
    """Replace the studies in stored results by those in mlruns, and time their steps again.

    The advice and the runs of `fit` stay.

    Args:
        names: Of the workloads.
    """
    for workload in WORKLOADS:
        if workload.name not in names:
            continue
        print(f"{workload.name}: timing steps", flush=True)
        study = read_study(workload)
        if not study:
            raise RuntimeError(f"mlruns has no finished study of {workload.study}.yaml")
        output, _ = run_here("steps", workload, *sizes_of(study))
        set_step_seconds(study, json.loads(output))
        results = read_results()
        results[workload.name].update(study)
        write_results(results)


def write_results(results: dict[str, Any]) -> None:
    """Store the results of all workloads."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def sizes_of(study: dict[str, Any]) -> list[str]:
    """Return the batch sizes of an exhaustive study as arguments."""
    return [str(row["batch_size"]) for row in study["exhaustive"]]


def set_step_seconds(study: dict[str, Any], seconds: dict[str, float]) -> None:
    """Add the time of a step with its checks to each row of an exhaustive study."""
    for row in study["exhaustive"]:
        row["step_seconds"] = seconds[str(row["batch_size"])]


def stored_study(workload: Workload) -> dict[str, Any]:
    """Return the exhaustive study in the stored results; empty without one."""
    stored = read_results().get(workload.name, {})
    return {key: stored[key] for key in ("exhaustive", "rates", "study_date") if key in stored}


def read_study(workload: Workload) -> dict[str, Any]:
    """Return the exhaustive study of a workload in mlruns; empty if it is not finished."""
    import yaml

    import lit_dps
    from lit_dps.core.errors import UserError

    name = yaml.safe_load((CONFIGS / f"{workload.study}.yaml").read_text())["study"]["name"]
    try:
        analysis = lit_dps.load(name).analysis
    except UserError:
        return {}
    return measured_study(analysis)


def measured_study(analysis: Any) -> dict[str, Any]:
    """Return the steps of an exhaustive study by batch size; empty if it is not finished.

    Of the repeated samples at a batch size, the one with the least median counts. This median is
    slightly too small, because it is the least of some.
    """
    from lit_dps.analysis.law import fit_law
    from lit_dps.analysis.observations import observations_of_repeats

    best: dict[int, Any] = {}
    for each in analysis.repeats:
        if not each.results or len(each.results) < each.planned:
            return {}
        size = each.cell.batch_size
        if size not in best or each.quantile(0.5) < best[size].quantile(0.5):
            best[size] = each
    if set(best) != set(analysis.record.batch_sizes):
        return {}
    first = [dataclasses.replace(each, rank=1) for each in best.values()]
    law = fit_law(observations_of_repeats(first, search_noise=0.0), uses_medians=True)
    return {
        "exhaustive": [row_of(best[size], float(law.steps(size))) for size in sorted(best)],
        "rates": analysis.record.trials,
        "study_date": datetime.date.today().isoformat(),
    }


def row_of(repeats: Any, by_law: float) -> dict[str, Any]:
    """Return the steps of a batch size over seeds.

    Args:
        repeats: The `RepeatSummary` of its best rate.
        by_law: Steps by the law through all medians.
    """
    return {
        "batch_size": repeats.cell.batch_size,
        "k_star": float(repeats.searched_cost),
        "median": _finite(repeats.quantile(0.5)),
        "least": _finite(repeats.quantile(0)),
        "lower": _finite(repeats.quantile(0.25)),
        "upper": _finite(repeats.quantile(0.75)),
        "most": _finite(repeats.quantile(1)),
        "runs": len(repeats.results),
        "steps": [_finite(steps) for steps in repeats.costs_over_seeds],
        "by_law": by_law,
    }


def _finite(steps: float) -> float | None:
    """Return steps, or None for a run that missed the goal."""
    return float(steps) if math.isfinite(steps) else None


def ask(name: str, folder: str, sizes: list[int]) -> None:
    """Run `advise` and its recommendation in this process, and print one line of JSON.

    Args:
        name: The name of the configuration.
        folder: A new folder for the storage.
        sizes: Batch sizes of the exhaustive study.
    """
    import lit_dps
    from lit_dps.advice.pilot_evidence import results_at
    from lit_dps.cli.advise import give_advice
    from lit_dps.cli.command_line import CommandLine
    from lit_dps.cli.json_output import stdout_on_stderr
    from lit_dps.storage.advice_store import list_advice

    config = str(CONFIGS / f"{name}.yaml")
    command = CommandLine(["advise", "--config", config, "--storage.folder", folder])
    answers: list[Any] = []
    with stdout_on_stderr():
        code = give_advice(command, answers)
        ended = time.time()
    (advice,) = answers
    # A record is cut at the race limit, but the cost is what was run. The user's run counts with its
    # readings and its start, the others by their steps and validations.
    with patch("lit_dps.storage.read.truncate_at_race_limit", lambda results, *_: results):
        record = lit_dps.load(f"{advice.name}-advice", folder).analysis.record
    runs = []
    for cell, results in record.results.items():
        for result in results:
            seconds = result.seconds
            if cell.batch_size != record.batch_sizes[0] or result.trial.point:
                seconds = result.timed["training"] + result.timed["checking"]
            runs.append([cell.batch_size, result.steps_run, seconds, result.seconds])
    (stored,) = [each for each in list_advice(storage_url(folder)).values() if "pilot" in each]
    document = advice.to_dict()
    fits = []
    if document["recommendation"] is not None:
        fits = [fit_outcome(advice.name, folder, seed) for seed in SEEDS]
    step_seconds, check_seconds = timed_steps(config, sizes)
    (pilot,) = results_at(record, record.batch_sizes[0])[:1]
    answer = {
        "study": advice.name,
        "ended": ended,
        "fit": fits,
        "code": code,
        "pilot": {key: stored["pilot"][key] for key in ("steps", "steps_run", "seconds")},
        "training_seconds": seconds_of_training(pilot, check_seconds),
        "pilot_size": record.batch_sizes[0],
        "runs": runs,
        "predicted": predictions(advice.law, sizes),
        "recommendation": document["recommendation"],
        "measured": document["measured"],
        "waited": stored["waited"],
        "step_seconds": step_seconds,
    }
    print(json.dumps(answer))


def seconds_of_training(pilot: Any, check_seconds: float) -> float:
    """Return the seconds that the user's run takes in `fit`, which validates fully.

    The time of the readings along the run is left out.

    Args:
        pilot: The result of the user's run.
        check_seconds: Of a full validation, for a run whose validations stopped early.
    """
    timed = pilot.timed
    if 0 in pilot.curve.get("exact", []):
        return timed["training"] + timed["checks"] * check_seconds
    return timed["training"] + timed["checking"]


def timed_steps(config: str, sizes: list[int]) -> tuple[dict[int, float], float]:
    """Return seconds of a step with its share of a check by batch size, and seconds of a check.

    They are those of `fit`, each the median over rounds. The time for which the process waits for a
    CPU is left out.

    Args:
        config: The file of the configuration.
        sizes: Batch sizes, in examples.
    """
    import torch

    from lit_dps.advice.step_probe import fit_threads
    from lit_dps.advice.user_workload import prepare_pilot
    from lit_dps.cli.study import read_setup
    from lit_dps.core.trial import LIGHTNING, Cell, Trial
    from lit_dps.study.probe_run import timed_run

    setup = prepare_pilot(read_setup(["--config", config])).setup
    setup = dataclasses.replace(setup, study=dataclasses.replace(setup.study, engine=LIGHTNING))
    torch.set_num_threads(fit_threads(setup))
    interval = setup.built_goal.check_interval
    trials = {size: Trial(Cell(size), 0, setup.middle, setup.study.seed) for size in sizes}
    counts = {}
    for size, trial in trials.items():
        rough = timed_run(setup, trial, MIN_TIMED_STEPS)
        count = round(TIMED_SECONDS / (rough.step - rough.step_waited))
        counts[size] = min(max(count, MIN_TIMED_STEPS), MAX_TIMED_STEPS)
    steps: dict[int, list[float]] = {size: [] for size in sizes}
    checks = []
    for _ in range(ROUNDS):
        for size, trial in trials.items():
            times = timed_run(setup, trial, counts[size])
            steps[size].append(times.step - times.step_waited)
            checks.append(times.check - times.check_waited)
    check = statistics.median(checks)
    share = check / interval
    return {size: statistics.median(each) + share for size, each in steps.items()}, check


def predictions(law: Any, sizes: list[int]) -> list[list[float]]:
    """Return batch size, lower limit, median and upper limit of K: the 80 % interval.

    Batch sizes for which the law answers nothing are left out.
    """
    import numpy as np

    tail = (1 - COVERAGE) / 2
    low, high = law.reach
    rows = []
    for size in sizes:
        if low <= size <= high:
            draws = law.samples([size])[:, 0]
            rows.append([size, *np.quantile(draws, [tail, 0.5, 1 - tail]).tolist()])
    return rows


def storage_url(folder: str) -> str:
    """Return the storage URL of a storage folder."""
    from lit_dps.core.config import StorageConfig

    return StorageConfig(folder=folder).optuna_url


def fit_outcome(study: str, folder: str, seed: int) -> dict[str, Any]:
    """Run the recommended configuration on a seed, and return its steps and hours."""
    from lit_dps.cli import main as run_main
    from lit_dps.cli.json_output import stdout_on_stderr
    from lit_dps.storage.advice_store import list_advice

    config = f"{folder}/figures/{study}/advice/fit.yaml"
    with stdout_on_stderr():
        code = run_main(["fit", "--config", config, "--seed_everything", str(seed)])
    outcomes = list_advice(storage_url(folder))[study]["outcomes"]
    names = ("steps", "reached", "hours", "predicted_steps", "predicted_hours")
    return {"code": code, **{name: outcomes[-1][name] for name in names}}


def run_command(*arguments: str) -> None:
    """Run a command of lit-dps.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    code = "import sys; from lit_dps.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    if process.returncode:
        raise RuntimeError(process.stdout[-3000:])


def run_here(mode: str, workload: Workload, *arguments: str) -> tuple[str, str]:
    """Run this file in a process of its own, and return its last line and its messages.

    Raises:
        RuntimeError: with the end of its messages, if it fails.
    """
    process = subprocess.run(
        [sys.executable, __file__, mode, workload.name, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    if process.returncode:
        raise RuntimeError(process.stderr[-3000:])
    return process.stdout.splitlines()[-1], process.stderr


def environment() -> dict[str, str]:
    """Return the environment of the commands: one thread, and the modules of configs/advice."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{CONFIGS}"}


def commit() -> str:
    """Return the commit of this working tree."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """Return the processor and the version of PyTorch."""
    import torch

    from lit_dps.study.hardware import hardware

    return f"{hardware()}, torch {torch.__version__.partition('+')[0]}"


if __name__ == "__main__":
    _, mode, name, *rest = sys.argv
    if mode == "steps":
        configuration = str(CONFIGS / f"{name}.yaml")
        print(json.dumps(timed_steps(configuration, [int(size) for size in rest])[0]))
    else:
        folder, *sizes = rest
        ask(name, folder, [int(size) for size in sizes])
