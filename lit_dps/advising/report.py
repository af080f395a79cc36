"""What advice says and writes: the answer as text, table, figure, and a configuration that `fit` takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_dps.advice import Answer, Branched, Checks, StepTime, answer, render
from lit_dps.advising.branches import branched, described
from lit_dps.advising.confirm import one_run
from lit_dps.advising.options import Options, time_text
from lit_dps.advising.plan import candidates, law_with, training_seconds
from lit_dps.advising.probes import Probes, best_rates, observations, unfinished
from lit_dps.advising.recommended import of_branches, of_probes, rate_key
from lit_dps.advising.steps import StepTimes
from lit_dps.advising.workload import own_batch_size, probing
from lit_dps.analysis import Analysis, Law, adaptive_advice, figures_folder, write_csv
from lit_dps.files import replacing
from lit_dps.noise import NoiseScale
from lit_dps.record import StudyRecord
from lit_dps.store import AdviceStore
from lit_dps.study.setup import StudySetup

BUSY = 0.2  # share of the time that a process waits for a CPU, above which its times are told not to be its own


def conclude(
    work: Probes,
    setup: StudySetup,
    model: StepTime,
    times: StepTimes,
    noise: NoiseScale | None,
    store: AdviceStore,
    options: Options,
    adaptive: bool = False,
) -> Answer:
    """The answer of all that was measured so far. Where no probe was run, what forks say takes the law's place."""
    record, key, kept = work.record(), rate_key(work.setup), store.read()
    sizes = candidates(times, options.devices, setup.workload.accumulated)
    # in full, since `fit` shows and saves what a check finds; probes stop theirs early
    checks = Checks(times.check, setup.goal_of_trials.check_interval)
    if record is None and (forks := branched(kept, setup)) is not None:
        rate = forks.rate(key, work.setup.study.space[key].at(0.5), adaptive) if key else None
        return answer(forks, model, sizes, options.devices, options.price, checks, rate)
    law, rates = law_with(observations(record), noise), best_rates(record)
    rate = None if rates is None else rates.law
    k_of = {int(row["batch_size"]): row["steps"] for row in law.predict(sizes).dropna().to_dict("records")}
    one = one_run(kept.get("confirmed", []), k_of, record, rate, key)
    return answer(law, model, sizes, options.devices, options.price, checks, rate, one_run=one)


def tell(
    work: Probes,
    setup: StudySetup,
    model: StepTime,
    times: StepTimes,
    noise: NoiseScale | None,
    store: AdviceStore,
    options: Options,
    adaptive: tuple[float, float] | None,
) -> None:
    """Prints the answer, writes its files, and shows both in MLflow.

    `adaptive` are beta2 and weight decay at the own batch size, of an optimizer like Adam, which probes moved with it.
    """
    record, branches = work.record(), store.read().get("branches", [])
    found = conclude(work, setup, model, times, noise, store, options, adaptive is not None)
    law, forked = found.law, isinstance(found.law, Branched)
    lines = [f"advice on {setup.study.name}: {setup.goal_of_trials}, {_asked(options)}", ""]
    lines += [law.describe()] if not forked else []
    if noise is not None:
        lines.append(noise.sentence)
    busy = f"the machine was busy while steps were timed: this process waited for a CPU {times.waited:.0%} of the time"
    lines += [f"{busy}, and so will what is predicted"] if times.waited > BUSY else []
    lines += [model.describe(), f"the largest batch of a device that was timed is {times.largest}: {times.why}", ""]
    if branches:
        lines += [*described(branches), ""]
    text = "\n".join(lines) + render(found)
    scales = _scales(setup, found, adaptive) if not forked else None
    training = training_seconds(work.setup, model, times)
    text += "".join(f"note: {line}\n" for line in _notes(record, forked, options, model, training, scales))
    folder = figures_folder(setup.storage.folder, setup.study.name) / "advice"
    if forked:
        config = of_branches(setup, probing(setup, options.trials, adaptive=False), found, store)
    else:
        config = of_probes(setup, work.setup, record, found, store)
    files = _write(folder, found, law, text, config, scales)
    print(text, end="")
    print("\nwritten:\n" + "\n".join(f"  {file}" for file in files))
    if (chosen := folder / "fit.yaml").exists() and found.best is not None:
        later = "; then lit-dps calibration compares the prediction with it" if not forked or law.met else ""
        print(f"\nrun it: lit-dps fit --config {chosen}{later}")
    _show(work, record, found, files)


def _scales(setup: StudySetup, found: Answer, adaptive: tuple[float, float] | None) -> str | None:
    """What the second moment and the weight decay of the recommended batch size are; None where they stay."""
    own = own_batch_size(setup.workload)
    if adaptive is None or found.best is None or found.best["batch_size"] == own:
        return None
    return adaptive_advice(own, int(found.best["batch_size"]), *adaptive)


def _asked(options: Options) -> str:
    devices = ", ".join(map(str, options.devices))
    return f"on {devices} device{'s' * (options.devices != (1,))}"


def _notes(
    record: StudyRecord | None,
    forked: bool,
    options: Options,
    model: StepTime,
    training: float | None,
    scales: str | None,
) -> list[str]:
    lines = [] if scales is None else [f"{scales}: AdamScalingCallback sets them in fit.yaml, as it did in the probes"]
    if record is None and not forked:
        most = "" if training is None else f"; one of {options.trials} trials takes up to "
        most += "" if training is None else f"{time_text(options.trials * training)} beside {time_text(options.budget)}"
        lines.append(f"the budget was too small for one probe: how many steps a goal takes is not known{most}")
    elif left := unfinished(record):
        lines.append(
            f"the trials at B = {', '.join(map(str, left))} are not all run, for want of time: K there is of a shorter "
            "search; a larger --budget goes on"
        )
    several = [n for n in options.devices if n > 1 and model.at(4096 * n, n) is None]
    if several:
        lines.append(
            f"nothing is said of {', '.join(map(str, several))} devices: no step of theirs was timed, and without "
            "--bandwidth nothing tells what exchanging gradients takes"
        )
    return lines


def _write(
    folder: Path, found: Answer, law: Law | Branched, text: str, config: Mapping[str, Any] | None, scales: str | None
) -> list[Path]:
    from lit_dps.analysis.figures.advice import draw_advice  # matplotlib, only where something is drawn

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
        limits = "the fewest and most" if isinstance(law, Branched) else "95 % limits"
        figure = draw_advice(found.table, law.observations, found.best, found.price, limits)
        for suffix in ("png", "pdf"):
            with replacing(folder / f"advice.{suffix}") as temporary:
                figure.savefig(temporary, format=suffix, dpi=150)
            files.append(folder / f"advice.{suffix}")
    return files


def _show(work: Probes, record: StudyRecord | None, found: Answer, files: list[Path]) -> None:
    """The probes and the answer, on the MLflow run of the study that probes."""
    if record is None:
        return
    work.view.sync(record, Analysis(record), files)  # `analyze` draws the probes, which takes seconds
    if work.view.tracker is None or found.best is None:
        return
    shown = {f"advice/{key}": float(found.best[key]) for key in ("batch_size", "devices", "steps", "hours")}
    work.view.metrics(shown)
    print(f"the probes and this answer are in MLflow, study {record.name}", file=sys.stderr)
