"""What advice says and writes: the answer as text, table, figure, and a configuration that `fit`
takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.advice.answer import Answer, Checks, Terms, answer
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.branch_run import branched, described
from lit_dps.advice.mlflow_log import show, show_answer
from lit_dps.advice.next_probe import law_with_prior
from lit_dps.advice.one_run import ratio_of_one_run
from lit_dps.advice.optimizer_probe import look_at_optimizers
from lit_dps.advice.probe_study import (
    best_rates,
    failed_trials,
    has_no_room,
    observations,
    unfinished,
)
from lit_dps.advice.question import Question
from lit_dps.advice.recommended_config import of_branches, of_probes, parameters_at, rate_key
from lit_dps.advice.text import render
from lit_dps.advice.user_workload import own_batch_size, probing
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import AT_LEAST
from lit_dps.analysis.rates import adaptive_advice
from lit_dps.analysis.tables import listed_numbers, three_digits, write_csv
from lit_dps.core.atomic_write import not_written, replacing
from lit_dps.core.errors import StorageError
from lit_dps.core.format import format_duration
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Trial
from lit_dps.report.notes import lines_of
from lit_dps.report.publish import figures_folder
from lit_dps.report.trial_notes import SCHEDULES, warm_up_notes

# share of the time that a process waits for a CPU, above which its times are told not to be its own
BUSY = 0.2


def conclude(case: Question) -> Answer:
    """The answer of all that was measured so far. Where no probe was run, what forks say takes the
    law's place."""
    setup, options = case.work.setup, case.options
    record, key, kept = case.work.record(), rate_key(setup), case.store.read()
    # in full, since `fit` shows and saves what a check finds; probes stop theirs early
    checks = Checks(case.times.check, setup.goal_of_trials.check_interval)
    asked = case.model, case.sizes, options.devices, Terms(options.price, checks)
    if record is None and (forks := branched(kept, case.setup)) is not None:
        middle = setup.study.space[key].at(0.5) if key else None
        # as the branches were trained: case.adaptive is None also where decay is searched or nobody
        # could look
        adaptive = kept.get("branch_adaptive", case.adaptive is not None)
        return answer(forks, *asked, None if middle is None else forks.rate(key, middle, adaptive))
    law, rates = law_with_prior(observations(record), case.noise), best_rates(record)
    rate = None if rates is None else rates.law
    k_of = {
        int(row["batch_size"]): row["steps"]
        for row in law.predict(case.sizes).dropna().to_dict("records")
    }
    one = ratio_of_one_run(kept.get("confirmed", []), k_of, record, rate, key)
    return answer(law, *asked, rate, one_run=one)


def tell(case: Question) -> None:
    """Prints the answer, writes its files, and shows both in MLflow."""
    found, record, setup = conclude(case), case.work.record(), case.setup
    params = None if isinstance(found.law, Branched) else parameters_at(record, found)
    scales = adaptive_note(case, found, params)
    if isinstance(found.law, Branched):
        forked = case.work.setup
        if not case.store.read().get("branch_scaled", False):
            forked = probing(setup, case.options.trials, adaptive=None)
        config = of_branches(setup, forked, found, case.store)
    else:
        config = of_probes(setup, case.work.setup, record, found, case.store)
    text = _text(case, found, record, scales)
    folder = figures_folder(setup.storage.folder, setup.study.name) / "advice"
    print(text, end="", flush=True)
    try:
        files = _write(folder, found, text, config, scales)
    except (StorageError, OSError) as error:  # a full disk costs the files, not the answer
        print(f"\n{not_written(str(folder), error)}", flush=True)
        return
    print("\nwritten:\n" + "\n".join(f"  {file}" for file in files))
    if (chosen := folder / "fit.yaml").exists() and found.best is not None:
        predicted = not isinstance(found.law, Branched) or found.law.met
        later = "; then lit-dps calibration compares the prediction with it" if predicted else ""
        print(f"\nrun it: lit-dps fit --config {chosen}{later}")
    if record is not None or isinstance(
        found.law, Branched
    ):  # else its time went to less than MLflow takes to begin
        show(case)
        show_answer(case, record, found, files, text)


def _text(case: Question, found: Answer, record: StudyRecord | None, scales: str | None) -> str:
    """What was measured, the answer, and what to know of both."""
    times, law, goal = case.times, found.law, case.setup.goal_of_trials
    devices = ", ".join(map(str, case.options.devices))
    on = f"on {devices} device{'s' * (case.options.devices != (1,))}"
    kept = case.store.read()
    lines = [f"advice on {case.setup.study.name}: {goal}, {on}", ""]
    if "max_steps" in kept:
        lines.append(f"goal.max_steps = {goal.max_steps} was chosen after a short run")
    lines += [law.line()] if isinstance(law, Law) else []
    lines += [case.noise.sentence] if case.noise is not None else []
    if times.waited > BUSY:
        lines.append(
            "the machine was busy while steps were timed: this process waited for a CPU "
            f"{times.waited:.0%} of the time, and so will what is predicted"
        )
    lines += [
        case.model.describe(),
        f"the largest batch of a device that was timed is {times.largest}: {times.why}",
    ]
    if branches := kept.get("branches", []):
        lines += ["", *described(branches)]
    notes = "".join(f"note: {line}\n" for line in _notes(case, found, record, scales))
    return "\n".join([*lines, "", render(found)]) + notes


def _notes(
    case: Question, found: Answer, record: StudyRecord | None, scales: str | None
) -> list[str]:
    lines = (
        []
        if scales is None
        else [f"{scales}: AdamScalingCallback sets them in fit.yaml, as it did in the probes"]
    )
    options = case.options
    if record is None and not isinstance(found.law, Branched):
        most = (
            f"one of {options.trials} trials takes up to "
            f"{format_duration(options.trials * case.training_seconds, 2)}"
        )
        lines.append(
            "the budget was too small for one probe: how many steps a goal takes is not known; "
            f"{most} beside {format_duration(options.budget, 2)}"
        )
    left = unfinished(record)
    for size, trials in sorted(failed_trials(record).items()):
        last = trials[-1].failure
        lines.append(
            f"at B = {size} {len(trials)} of {options.trials} trials failed, the last with {last}"
        )
        if size in left and has_no_room(last, case.work.setup.workload):
            left.remove(size)
    if left:
        lines.append(
            f"the trials at B = {', '.join(map(str, left))} are not all run, for want of time: K "
            "there is of a shorter "
            "search; a larger --budget goes on"
        )
    missed = [o for o in found.law.observations if o.bound == AT_LEAST]
    if missed and len(missed) == len(found.law.observations):
        most = three_digits(max(o.steps for o in missed))
        where = listed_numbers(o.batch_size for o in missed)
        lines.append(
            f"no trial met the goal within {most} steps, at B = {where}: an easier goal, a larger "
            "goal.max_steps, or a "
            "wider range of the learning rate"
        )
    if record is not None:
        lines += lines_of(SCHEDULES, Analysis(record))
        trials = [result for results in record.results.values() for result in results]
        k_of = (
            dict(zip(found.table["batch_size"], found.table["k_star"], strict=True))
            if len(found.table)
            else {}
        )
        lines += warm_up_notes(trials, k_of)
    if record is not None and case.largest < max(case.sizes):
        here = f"the {ranks} devices" if (ranks := case.setup.ranks) > 1 else "the device"
        lines.append(
            f"K is not measured above B = {case.largest}: no larger batch was seen to fit {here} "
            "here"
        )
    if several := [n for n in options.devices if n > 1 and case.model.at(4096 * n, n) is None]:
        lines.append(
            f"nothing is said of {', '.join(map(str, several))} devices: no step of theirs was "
            "timed, and without "
            "--bandwidth nothing tells what exchanging gradients takes"
        )
    return lines


def adaptive_note(case: Question, found: Answer, params: Mapping[str, Any] | None) -> str | None:
    """Return second moment and weight decay of the recommended batch size in words; None where they
    stay."""
    own = own_batch_size(case.setup.workload)
    adaptive = case.adaptive
    if adaptive is None or isinstance(found.law, Branched) or found.best is None:
        return None
    size = int(found.best["batch_size"])
    decay, ratio = adaptive.weight_decay, 1.0
    if adaptive.rate is not None and decay and params is not None:
        rate = _rate_at(case, size, params)
        if rate is None:
            decay = 0.0
        else:
            ratio = rate / adaptive.rate
    if (adaptive.beta2 is None and not decay) or (size == own and ratio == 1.0):
        return None
    return adaptive_advice(own, size, adaptive.beta2, decay, ratio)


def _rate_at(case: Question, batch_size: int, params: Mapping[str, Any]) -> float | None:
    """Return the rate that the optimizer starts from, which may differ from the metaparameter; None
    if unknown."""
    trial = Trial(Cell(batch_size), 0, dict(params), case.setup.study.seed)
    try:
        look = look_at_optimizers(case.work.setup, trial)
    except Exception:  # code of the user's, at a point of the space that no trial has seen
        return None
    if look.adaptive is None:
        return None
    # a rate of 0 leaves the ratio out, as AdamScalingCallback does
    return look.adaptive.rate or case.adaptive.rate


def _write(
    folder: Path, found: Answer, text: str, config: Mapping[str, Any] | None, scales: str | None
) -> list[Path]:
    from lit_dps.report.figures.advice import (
        draw_advice,
    )  # matplotlib, only where something is drawn

    folder.mkdir(parents=True, exist_ok=True)
    texts = {"advice.txt": text}
    if config is not None:
        said = "" if scales is None else f"# {scales}, set by AdamScalingCallback\n"
        texts["fit.yaml"] = said + yaml.safe_dump(config, sort_keys=False)
    else:
        (folder / "fit.yaml").unlink(missing_ok=True)
    for name, content in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    files = [folder / name for name in texts]
    if len(found.table):
        write_csv(found.table, folder / "answer.csv")
        files.append(folder / "answer.csv")
        limits = "the fewest and most" if isinstance(found.law, Branched) else "95 % limits"
        figure = draw_advice(found.table, found.law.observations, found.best, found.price, limits)
        for suffix in ("png", "pdf"):
            with replacing(folder / f"advice.{suffix}") as temporary:
                figure.savefig(temporary, format=suffix, dpi=150)
            files.append(folder / f"advice.{suffix}")
    return files
