"""What advice says and writes: the answer as text, table, figure, and a configuration that `fit` takes."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from lit_dps.advice import Answer, Checks, StepTime, answer, render
from lit_dps.advising.branches import described
from lit_dps.advising.confirm import one_run
from lit_dps.advising.options import Options
from lit_dps.advising.plan import candidates, law_with
from lit_dps.advising.probes import Probes, best_rates, check_seconds, observations, unfinished
from lit_dps.advising.steps import StepTimes
from lit_dps.advising.workload import RATES
from lit_dps.analysis import Analysis, figures_folder, write_csv
from lit_dps.files import replacing
from lit_dps.noise import NoiseScale
from lit_dps.record import StudyRecord
from lit_dps.store import AdviceStore, without_password
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import locate

PREDICTION = "lit_dps.advising.prediction.PredictionCallback"


def conclude(
    work: Probes,
    setup: StudySetup,
    model: StepTime,
    times: StepTimes,
    noise: NoiseScale | None,
    store: AdviceStore,
    options: Options,
) -> Answer:
    """The answer of all that was measured so far."""
    record, key = work.record(), rate_key(work.setup)
    law, rate = law_with(observations(record), noise), best_rates(record, key)
    sizes = candidates(times, options.devices, setup.workload.accumulated)
    k_of = {int(row["batch_size"]): row["steps"] for row in law.predict(sizes).dropna().to_dict("records")}
    one = one_run(store.read().get("confirmed", []), k_of, record, rate, key)
    checks = Checks(check_seconds(record, times.check), setup.goal_of_trials.check_interval)
    return answer(law, model, sizes, options.devices, options.price, checks, rate, one_run=one)


def rate_key(setup: StudySetup) -> str:
    """The metaparameter that is the learning rate; empty where none is searched."""
    return next((key for key in setup.study.space if key.rpartition(".")[2] in RATES), "")


def parameters_at(setup: StudySetup, record: StudyRecord | None, found: Answer) -> dict[str, Any] | None:
    """The metaparameters of the best row: of the nearest best trial, but the rate, by its law. None without any."""
    complete = [] if record is None else [cell for cell in Analysis(record).cells if cell.best is not None]
    if found.best is None or not complete:
        return None
    size, key = int(found.best["batch_size"]), rate_key(setup)
    nearest = min(complete, key=lambda cell: abs(cell.cell.batch_size / size - 1))
    params = dict(nearest.best.trial.params)
    if key and found.rate is not None and (rate := found.rate.at(size)) is not None:
        params[key] = float(rate)
    return params


def tell(
    work: Probes,
    setup: StudySetup,
    model: StepTime,
    times: StepTimes,
    noise: NoiseScale | None,
    store: AdviceStore,
    options: Options,
) -> None:
    """Prints the answer, writes its files, and shows both in MLflow."""
    record = work.record()
    branches = store.read().get("branches", [])
    found = conclude(work, setup, model, times, noise, store, options)
    law = found.law
    lines = [f"advice on {setup.study.name}: {setup.goal_of_trials}, {_asked(options)}", ""]
    lines += [law.describe()] if record is not None or not branches else []
    if noise is not None:
        lines.append(noise.sentence)
    lines += [model.describe(), f"the largest batch of a device that was timed is {times.largest}: {times.why}", ""]
    if branches:
        lines += [*described(branches), ""]
    alone = bool(branches) and record is None  # of the method branch, which knows nothing of K
    text = "\n".join(lines) + ("" if alone else render(found))
    text += "".join(f"note: {line}\n" for line in _notes(record, options, model))
    folder = figures_folder(setup.storage.folder, setup.study.name) / "advice"
    files = _write(folder, found, law, text, _recommended(setup, work.setup, record, found, store))
    print(text, end="")
    print("\nwritten:\n" + "\n".join(f"  {file}" for file in files))
    if (chosen := folder / "fit.yaml").exists() and found.best is not None:
        print(f"\nrun it: lit-dps fit --config {chosen}; then lit-dps calibration compares the prediction with it")
    _show(work, record, found, files)


def _asked(options: Options) -> str:
    devices = ", ".join(map(str, options.devices))
    return f"on {devices} device{'s' * (options.devices != (1,))}"


def _notes(record: StudyRecord | None, options: Options, model: StepTime) -> list[str]:
    lines = []
    if record is None:
        lines.append("no probe was run: how many steps a goal takes is not known")
    elif left := unfinished(record):
        lines.append(
            f"the trials at B = {', '.join(map(str, left))} are not all run, for want of time: K there is of a shorter "
            "search; a larger --budget goes on"
        )
    several = [n for n in options.devices if n > 1 and model.at(4096 * n, n) is None]
    if several:
        lines.append(
            f"nothing is said of {', '.join(map(str, several))} devices: they are not here, and without --bandwidth "
            "nothing tells what exchanging gradients takes"
        )
    return lines


def _write(folder: Path, found: Answer, law, text: str, config: Mapping[str, Any] | None) -> list[Path]:
    from lit_dps.analysis.figures.advice import draw_advice  # matplotlib, only where something is drawn

    folder.mkdir(parents=True, exist_ok=True)
    texts = {"advice.txt": text}
    if config is not None:
        texts["fit.yaml"] = yaml.safe_dump(config, sort_keys=False)
    else:
        (folder / "fit.yaml").unlink(missing_ok=True)
    for name, content in texts.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    files = [folder / name for name in texts]
    if len(found.table):
        write_csv(found.table, folder / "answer.csv")
        files.append(folder / "answer.csv")
        figure = draw_advice(found.table, law)
        for suffix in ("png", "pdf"):
            with replacing(folder / f"advice.{suffix}") as temporary:
                figure.savefig(temporary, format=suffix, dpi=150)
            files.append(folder / f"advice.{suffix}")
    return files


def _recommended(
    setup: StudySetup, probe: StudySetup, record: StudyRecord | None, found: Answer, store: AdviceStore
) -> dict[str, Any] | None:
    """The configuration of the best row, for `fit`; None without one."""
    if (params := parameters_at(probe, record, found)) is None:
        return None
    best = found.best
    size, devices = int(best["batch_size"]), int(best["devices"])
    specs = copy.deepcopy({"model": dict(probe.workload.model), "data": dict(probe.workload.data)})
    parts, largest = setup.workload.accumulated, found.step_time.largest
    if largest is not None:  # memory holds no more at once
        parts = max(parts, -(-size // (devices * largest)))
    for key, value in {**params, probe.workload.batch_size_key: size // parts}.items():
        node, name = locate(specs, key, "study.space")
        node[name] = value
    standard = {name: p.default for name, p in inspect.signature(Trainer.__init__).parameters.items()}
    trainer = {key: value for key, value in probe.workload.trainer.items() if value != standard.get(key, ...)}
    trainer = {key: value for key, value in trainer.items() if key not in ("max_epochs", "num_sanity_val_steps")}
    trainer |= {"devices": devices} | ({"accumulate_grad_batches": parts} if parts > 1 else {})
    ends = ("_low", "", "_high")
    predicted = {name: [float(best[f"{name}{end}"]) for end in ends] for name in ("steps", "hours")}
    where = {"storage": without_password(store.url), "study": setup.study.name}
    told = {"class_path": PREDICTION, "init_args": {**where, "batch_size": size, "devices": devices, **predicted}}
    listed = trainer.get("callbacks") or []
    trainer["callbacks"] = [*(listed if isinstance(listed, list) else [listed]), told]
    goal = {key: value for key, value in setup.goal.items() if value is not None}
    return {**specs, "trainer": trainer, "goal": goal}


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
