"""Prints the answer, writes its files, and logs it and its stages to MLflow."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from lit_dps.advice.answer import Answer
from lit_dps.advice.batch_dependence import note_on
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.branch_run import describe_forks, stored_forks
from lit_dps.advice.next_probe import with_rate
from lit_dps.advice.pilot_evidence import (
    PilotRun,
    best_rates_of_runs,
    unfinished_searches,
)
from lit_dps.advice.pilot_preview import Preview
from lit_dps.advice.probe_study import failed_trials
from lit_dps.advice.question import Question, conclude
from lit_dps.advice.recommendation import recommended_config, recommended_params
from lit_dps.advice.result import Advice
from lit_dps.advice.text import render, width_at, wrapped
from lit_dps.advice.user_workload import (
    SCHEDULE_CALLBACK,
    has_callback,
    look_at_optimizers,
    user_batch_size,
)
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.analysis.observations import AT_LEAST, AT_MOST
from lit_dps.analysis.tables import write_csv
from lit_dps.core.atomic_write import not_written, replacing
from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.config_yaml import ConfigDumper
from lit_dps.core.errors import StorageError
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import for_terminal, number_text, terminal_width
from lit_dps.core.trial import Cell, Trial
from lit_dps.report.notes import lines_of
from lit_dps.report.publish import figures_folder
from lit_dps.report.trial_notes import SCHEDULES, warm_up_notes
from lit_dps.tracking.description import markdown
from lit_dps.tracking.runs import MAX_TAG_CHARACTERS
from lit_dps.training.trainer_rules import as_list

# If the process waits for a CPU for more than this share of the time, step times get a note.
BUSY_SHARE = 0.2
TABLE_FILE = "answer.csv"
LOGGED_COLUMNS = ("batch_size", "devices", "steps", "hours")  # of the recommended row


@dataclass(frozen=True)
class _Report:
    """The parts of a report.

    Attributes:
        question: The question and the measurements.
        result: The answer.
        record: The study of the runs; None without runs.
        scaling: Second moment and weight decay of the recommended run; None if they do not change.
    """

    question: Question
    result: Answer
    record: StudyRecord | None
    scaling: str | None

    @property
    def is_branched(self) -> bool:
        """Whether the answer rests on forks of one run."""
        return isinstance(self.result.law, Branched)


def publish_answer(question: Question) -> Advice:
    """Print the answer, write its files, log both to MLflow, and return the answer."""
    result = conclude(question)
    record = question.probes.record()
    params = recommended_params(question, result)
    report = _Report(question, result, record, adaptive_note(question, result, params))
    text = _text(report)
    advice = _advice(report, text)
    shown = text
    if sys.stdout.isatty():
        shown = _text(report, terminal_width())
    print(shown, end="", flush=True)
    storage = question.setup.storage
    folder = figures_folder(storage.folder, question.setup.study.name) / "advice"
    config = recommended_config(question, result)
    try:
        files = _write(report, folder, text, config)
    except (StorageError, OSError) as error:
        # A full disk costs the files, not the answer.
        print(f"\n{not_written(str(folder), error)}", flush=True)
        return advice
    config_file = None if config is None else folder / "fit.yaml"
    # Paths and commands are copied, so these lines are not wrapped.
    print("\n".join(_files_text(files, config_file, result)))
    # Without a run or a fork, the command took less time than MLflow takes to start.
    if record is not None or report.is_branched:
        log_measurements(question)
        _log_answer(report, files, text + _details(report))
    return advice


def _advice(report: _Report, text: str) -> Advice:
    """Return the answer with its text and notes, for machines and for Python."""
    question, result = report.question, report.result
    rates: dict[float, float] = {}
    if question.plan is not None:
        best = best_rates_of_runs(report.record, question.plan)
        rates = {float(size): rate for size, rate in best.items()}
    return Advice(
        name=question.setup.study.name,
        source="measured",
        goal=str(question.setup.built_goal),
        law=result.law,
        answer=result,
        steps=result.law.predict(question.sizes_within_budget(result.law)),
        best_rates=rates,
        next_run=with_rate(result.next_run, rates),
        notes=tuple(_notes(report)),
        full_text=text,
    )


def _files_text(files: Sequence[Path], config_file: Path | None, result: Answer) -> list[str]:
    """Return where the files are, and the command that runs the recommendation, as lines."""
    names = ", ".join(file.name for file in files)
    lines = [f"written to {files[0].parent}: {names}"]
    if config_file is not None:
        command = f"run it: lit-dps fit --config {config_file}"
        if not isinstance(result.law, Branched) or result.law.met:
            command += "; then compare: lit-dps calibration"
        lines.append(command)
    return lines


def _text(report: _Report, terminal: int | None = None) -> str:
    """Return the answer and its notes, for a file or for a terminal of some columns."""
    width = width_at(terminal)
    question = report.question
    goal = question.setup.built_goal
    devices = ", ".join(map(str, question.options.devices))
    noun = "devices"
    if devices == "1":
        noun = "device"
    lines = [f"advice on {question.setup.study.name}: {goal}, on {devices} {noun}", ""]
    lines += render(report.result, terminal=terminal, file=TABLE_FILE).splitlines()
    if report.result.best is None and question.plan is not None:
        lines += wrapped(_why_no_answer(question), width=width)
    forks = stored_forks(question.store.read())
    if forks:
        lines += ["", *wrapped(describe_forks(forks), width=width)]
    lines += wrapped((f"note: {note}" for note in _notes(report)), width=width)
    return "\n".join(lines) + "\n"


def _why_no_answer(question: Question) -> list[str]:
    """Return why K is unknown, what to do next, and the best guess, a line each."""
    assert question.plan is not None
    stored = question.store.read()
    pilot = PilotRun.of_stored(stored)
    goal = question.setup.built_goal
    if pilot is None:
        why = "The budget ended before your run met its goal. A larger --budget continues it."
    elif pilot.steps is None:
        best = "" if pilot.best is None else f" (best {goal.metric}: {number_text(pilot.best)})"
        why = pilot.advice()
        if pilot.steps_run:
            why = f"Your run did not meet the goal in {pilot.steps_run} steps{best}. {why}"
    elif pilot.steps <= goal.check_interval:
        why = (
            "Your run met the goal at its first validation. Set goal.check_interval below "
            f"{goal.check_interval}, and another study.name."
        )
    else:
        why = f"Your run met the goal after {pilot.steps} steps."
    seconds = question.step_seconds_by_devices
    of_user = question.step_seconds_here(question.plan.batch_size)
    preview = Preview.of(question.plan, question.batch_sizes, seconds, of_user)
    return [why, *preview.best_guess()]


def _details(report: _Report) -> str:
    """Return the measurements as text, for the file of the answer."""
    question, law = report.question, report.result.law
    goal = question.setup.built_goal
    stored = question.store.read()
    times = question.times
    lines = ["", "measured:"]
    if "max_steps" in stored:
        lines.append(f"goal.max_steps = {goal.max_steps} was chosen after a short run")
    if isinstance(law, Law):
        lines += [law.line(), *law.notes]
        lines.append(f"error of the law on public curves: {100 * law.error:.0f} %, more beyond it")
        for each in law.observations:
            sign = {AT_LEAST: ">", AT_MOST: "<="}.get(each.bound, "=")
            lines.append(f"K {sign} {each.k:g} at B = {each.batch_size:g}")
    pilot = PilotRun.of_stored(stored)
    if pilot is not None and pilot.noise is not None:
        lines.append(f"noise scale of the second half of your run: {pilot.noise}")
    lines.append(question.step_time.describe())
    lines.append(f"the largest timed batch of a device is {times.largest}: {times.reason}")
    return "\n".join([*lines[:2], *wrapped(lines[2:], "  ")]) + "\n"


def _notes(report: _Report) -> Iterator[str]:
    """Yield notes on the answer, one or more sentences each."""
    question, record = report.question, report.record
    stored = question.store.read()
    yield from stored.get("weaknesses", {})
    if report.scaling is not None:
        yield f"fit.yaml sets {report.scaling}"
    best = report.result.best
    if question.decay is not None and best is not None:
        note = question.decay.note(int(best["batch_size"]), best["steps"])
        if note is not None:
            yield note
    for each in question.depends_on_batch:
        yield note_on(each, question.setup.workload.accumulated > 1)
    if question.times.waited > BUSY_SHARE:
        yield (
            f"Other programs were running: this process waited for a CPU "
            f"{100 * question.times.waited:.0f} % of the timed steps, so times are too long."
        )
    yield from _notes_on_failures(record)
    if record is not None:
        # The note of the decay replaces the note on K early in the schedule.
        schedules = SCHEDULES if question.decay is None else SCHEDULES[:1]
        yield from lines_of(schedules, Analysis(record))
        table = report.result.table
        k_of = dict(zip(table["batch_size"], table["steps"], strict=True))
        callbacks = as_list(question.probes.setup.workload.trainer.get("callbacks"))
        if not has_callback(callbacks, SCHEDULE_CALLBACK):
            yield from warm_up_notes(list(chain.from_iterable(record.results.values())), k_of)
        if question.largest < max(question.batch_sizes):
            ranks = question.setup.ranks
            here = "the device"
            if ranks > 1:
                here = f"the {ranks} devices"
            yield (
                f"K was not measured above B = {question.largest}, the largest batch size that is "
                f"known to fit on {here} here."
            )
    within = question.sizes_within_budget(report.result.law)
    left_out = [str(size) for size in question.batch_sizes if size not in within]
    if left_out:
        budget = replace(question.setup.built_goal, max_seconds=None).budget_text
        yield (
            f"B = {', '.join(left_out)} is left out, because a run there would spend its budget of "
            f"{budget} before the goal."
        )
    untested = stored.get("untested_rate")
    if untested:
        yield (
            f"Your learning rate may be too {untested[0]}, by the best rates at larger batch "
            f"sizes. No time was left to run your batch size with {untested[1]}, so the steps at "
            "your batch size and below may be too many."
        )
    if question.plan is not None:
        for size, rates in unfinished_searches(stored, question.plan).items():
            noun = "learning rate" if rates == 1 else "learning rates"
            yield (
                f"At B = {size} the time sufficed for {rates} {noun}. Another one may need fewer "
                "steps there and at the batch sizes near it."
            )
    unknown = ", ".join(map(str, question.devices_without_times))
    if unknown:
        yield (
            f"There is no answer for {unknown} devices, because no step on them was timed. Give "
            "--bandwidth (bytes per second between two devices, such as 1e10) for an estimate."
        )


def _notes_on_failures(record: StudyRecord | None) -> Iterator[str]:
    """Yield a note for each batch size at which runs failed."""
    for size, failed in sorted(failed_trials(record).items()):
        noun = "run" if len(failed) == 1 else "runs"
        yield f"At B = {size}, {len(failed)} {noun} failed, the last with {failed[-1].failure}"


def adaptive_note(
    question: Question, result: Answer, params: Mapping[str, Any] | None
) -> str | None:
    """Return second moment and weight decay at the recommended batch size as text.

    Args:
        question: The question.
        result: The answer.
        params: Metaparameters of the recommended run.

    Returns:
        None if they do not change with the batch size.
    """
    adaptive = question.adaptive
    if adaptive is None or isinstance(result.law, Branched) or result.best is None:
        return None
    user_size = user_batch_size(question.setup.workload)
    size = int(result.best["batch_size"])
    decay = adaptive.weight_decay
    ratio = 1.0
    unknown = ""
    if adaptive.rate is not None and decay and params is not None:
        rate = _initial_rate(question, size, params)
        if rate is None:
            decay = 0.0
            unknown = "a weight decay that follows the optimizer's rate, which could not be read"
        else:
            ratio = rate / adaptive.rate
    if adaptive.beta2 is None and not decay:
        return unknown or None
    if size == user_size and ratio == 1.0 and not unknown:
        return None
    known = adaptive_text(user_size, size, adaptive.beta2, decay, ratio)
    return f"{known}, and {unknown}" if unknown else known


def adaptive_text(
    batch_size: int, other: int, beta2: float | None, weight_decay: float, rate_ratio: float = 1.0
) -> str:
    """Return second moment and weight decay at another batch size, as `AdamScalingCallback` does.

    Args:
        batch_size: B0, at which the values are known.
        other: B, the other batch size.
        beta2: At B0; None for a rule without a second moment.
        weight_decay: At B0.
        rate_ratio: Learning rate at B over the learning rate at B0.
    """
    factor = other / batch_size
    new = []
    old = []
    if beta2 is not None:
        # With 3 digits it would be 1.00.
        new.append(f"beta2 {scaled_beta2(beta2, factor):.6g}")
        old.append(f"{beta2:.6g}")
    if weight_decay:
        new.append(f"weight decay {scaled_decay(weight_decay, factor, rate_ratio):.3g}")
        old.append(f"{weight_decay:.3g}")
    return f"{', '.join(new)} (from {' and '.join(old)} at B = {batch_size:g})"


def _initial_rate(question: Question, batch_size: int, params: Mapping[str, Any]) -> float | None:
    """Return the rate that the optimizer starts from; None if it is unknown.

    It may differ from the metaparameter.
    """
    assert question.adaptive is not None
    trial = Trial(Cell(batch_size), 0, dict(params), question.setup.study.seed)
    try:
        look = look_at_optimizers(question.probes.setup, trial)
    except Exception:
        # The user's code fails at a point of the search space that no trial has had.
        return None
    if look.adaptive is None:
        return None
    # Like in AdamScalingCallback, a rate of 0 leaves out the ratio.
    return look.adaptive.rate or question.adaptive.rate


def _write(
    report: _Report, folder: Path, text: str, config: Mapping[str, Any] | None
) -> list[Path]:
    """Write text, configuration, table and figure; return their paths."""
    result = report.result
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"advice.txt": text + _details(report)}
    if config is None:
        (folder / "fit.yaml").unlink(missing_ok=True)
    else:
        comment = ""
        if report.scaling is not None:
            comment = f"# {report.scaling}, set by AdamScalingCallback\n"
        texts["fit.yaml"] = comment + yaml.dump(config, Dumper=ConfigDumper, sort_keys=False)
    files = []
    for name, content in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        files.append(folder / name)
    if not len(result.table):
        return files
    write_csv(result.table, folder / TABLE_FILE)
    files.append(folder / TABLE_FILE)
    # matplotlib takes long to import.
    from lit_dps.report.figures.advice import draw_advice

    limits = "the fewest and most" if report.is_branched else "95 % limits"
    observations = result.law.observations
    figure = draw_advice(result.table, observations, result.best, result.price, limits)
    for suffix in ("png", "pdf"):
        with replacing(folder / f"advice.{suffix}") as temporary:
            figure.savefig(temporary, format=suffix, dpi=150)
        files.append(folder / f"advice.{suffix}")
    return files


def log_measurements(question: Question) -> None:
    """Log all that was measured so far to MLflow, on the run of the study that probes.

    The steps of its curves are the local batch size, or the step of a fork.
    """
    stored = question.store.read()
    curves: dict[str, dict[int, float]] = {}
    for row in question.times.timed:
        name = "advice/step_seconds"
        if row.devices > 1:
            name += f"_on_{row.devices}_devices"
        curve = curves.setdefault(name, {})
        curve[int(row.local_batch)] = row.seconds
    for fork in stored_forks(stored):
        low, high = fork.critical
        curves.setdefault("advice/critical_at_least", {})[fork.step] = low
        if math.isfinite(high):
            curves.setdefault("advice/critical_below", {})[fork.step] = high
    metrics = {"advice/check_seconds": question.times.check}
    pilot = PilotRun.of_stored(stored)
    if pilot is not None and pilot.noise is not None:
        metrics["noise_scale_low"] = pilot.noise.low
        metrics["noise_scale_readings"] = pilot.noise.readings
        if pilot.noise.resolved:
            metrics["noise_scale"] = pilot.noise.value
    question.probes.mlflow.log_outcome(metrics, curves)


def _log_answer(report: _Report, files: Sequence[Path], text: str) -> None:
    """Log numbers and files of the answer to MLflow, and its text as the description of the run."""
    probes = report.question.probes
    # Markdown shows indented lines as they are.
    description = f"    {text.strip()}".replace("\n", "\n    ")
    if report.record is not None:
        # The files of `analyze` take seconds to draw, so they are not made here.
        analysis = Analysis(report.record)
        probes.mlflow.sync(report.record, analysis, files)
        limit = MAX_TAG_CHARACTERS - len(description) - 2
        description += f"\n\n{markdown(analysis, limit=limit)}"
    metrics = {}
    best = report.result.best
    if best is not None:
        metrics = {f"advice/{key}": float(best[key]) for key in LOGGED_COLUMNS}
    probes.mlflow.log_outcome(metrics, files=files, note=description, has_ended=True)
    if probes.mlflow.experiment_id is not None:
        line = f"the stages and this answer are in MLflow, study {probes.name}"
        print(for_terminal(line, stream=sys.stderr), file=sys.stderr)
