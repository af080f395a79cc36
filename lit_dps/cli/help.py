"""The help of what trains: the keys of this package, in two screens, without the import of PyTorch.

LightningCLI lists every argument of Lightning's Trainer first; `--help-all` does. What is written
here is kept in step with the keys by a test.
"""

from __future__ import annotations

ALL = "--help-all"
USAGE = {
    "study": (
        "Runs a study: K*, the fewest optimizer steps to the goal, for each batch size\n"
        "and sparsity. The same command goes on after any end, and extends a study."
    ),
    "advise": "Says within a budget which batch size, how many devices, how long, at what cost.",
    "masks": "What pruning methods keep of each layer at initialization; nothing is trained.",
    "fit": (
        "Trains one trial, with Lightning's Trainer; the goal or the budget ends it.\n"
        "With --of STUDY --cell B=32,S=0.9 it trains that of K* of a stored study again."
    ),
    "validate": "Evaluates a checkpoint of `fit` on the validation split.",
    "test": "Evaluates a checkpoint of `fit` on the test split.",
}
OPTIONS = {
    "study": {
        "--forecast": "run nothing: tell how many trials, how many hours",
        "--extend-space": "widen ranges whose best values lie near an end",
        "--take-over": "release the trials of processes that do not answer",
        "--accept-code-change": "resume although your code or data changed",
        "--show PARTS": "print too: critical, theory, files; or all",
        "--validate-every N": "show the time of a validation every N steps",
        "--time-steps": "time the training steps of every cell again",
        "--engine NAME": "short for --study.engine",
    },
    "advise": {
        "--budget TIME": "wall time of asking: 90s, 30m, 2h; needed",
        "--method NAME": "law (probes batch sizes) or branch (forks a run)",
        "--devices LIST": "numbers of devices to answer for: 1,2,4,8",
        "--price X": "price of a device-hour",
        "--bandwidth X": "bytes a second between two devices",
        "--latency X": "seconds of a message between two devices (1e-5)",
        "--trials N": "trials of each probe (8)",
    },
    "masks": {
        "--at LIST": "sparsities, in place of the study's own",
        "--points N": "points of the search, each with own weights (3)",
        "--output FOLDER": "of tables and figures (FOLDER/figures/NAME-masks)",
    },
    "fit": {
        "--of STUDY": "a study that has the trial, in place of FILE",
        "--cell CELL": "its cell, such as B=32,S=0.9",
        "--point N": "another point of the cell than that of K*",
        "--trust": "with --of: import the modules of a foreign study",
        "--checkpoint FILE": "with --of: save the weights here",
        "--ckpt_path FILE": "a checkpoint to go on from",
    },
    "validate": {"--ckpt_path FILE": "the checkpoint"},
    "test": {"--ckpt_path FILE": "the checkpoint"},
}
COMMON = {
    "--config FILE": "the configuration; of several the later ones win",
    "--print_config": "the whole configuration, with defaults",
    "--help-all": "every key, also of Lightning's Trainer: 770 lines",
    "--model.help CLASS": "the arguments of a class; likewise --data.help",
}
SECTIONS = {
    "model, data": "your LightningModule and LightningDataModule: class_path, init_args",
    "trainer": "arguments of Lightning's Trainer: accelerator, devices, strategy, ...",
    "study": "the grid and the search",
    "goal": "when a trial has learned enough; one of error, at_most, at_least",
    "pruning": "at initialization",
    "optim, local": "stale gradients, local SGD",
    "smoothness": "measures the terms of the theory",
    "storage": "where a study is kept",
}
KEYS = {
    "study": {
        "name": "in Optuna and MLflow (mine, of mine.yaml)",
        "batch_sizes": "of the grid ([2, 4, 8, ..., 16384])",
        "sparsities": "shares of pruned weights ([0, 0.5, 0.7, 0.9])",
        "grid": "further axes: {KEY: [values]}",
        "trials": "points of the search in each cell (100)",
        "space": "searched: {KEY: {low, high, scale}} or {choices}",
        "sampler": "sobol, tpe, gp or a class path (sobol)",
        "best_of": "a study whose best points all trials take",
        "seed scramble": "of search and trials (0); Owen's scrambling (true)",
        "goals": "further, easier goals of the same trials",
        "race_factor": "trials stop at so many times the least K (2)",
        "train_past_goal": "trials train on to the budget after it (false)",
        "metrics": "further metrics to keep at each check",
        "noise_scale": "a first guess of B_crit before the trials (true)",
        "repeats": "run each best point on so many fresh seeds (0)",
        "repeat_points": "how many of the best points are repeated (1)",
        "repeat_slack": "a repeat ends at so many times K* (8)",
        "engine": "the loop: single, stacked, lightning or auto (single)",
        "workers": "trials at a time (one a CPU core, or one on a GPU)",
        "threads slots": "CPU threads of a worker (1); trials in lockstep",
        "checkpoint_minutes": "how often long trials are saved (10)",
        "batch_size_key": "where the batch size is set (data.batch_size)",
        "workload": "name of the MLflow experiment",
        "lean": "former key: false is engine lightning",
    },
    "goal": {
        "error": "validation error, a share",
        "metric": "any other metric that is logged in validation",
        "at_most at_least": "it is to fall, or to rise to",
        "check_interval": "optimizer steps between two checks (16)",
        "max_steps": "step budget of a trial (40000)",
        "monitor": "name that the error is logged under (val_error)",
        "early_reject": "a check stops once the goal is missed (a study)",
    },
    "pruning": {
        "method": "snip, grasp, synflow, ... or a class path (snip)",
        "options": "arguments of the method",
        "biases": "paper (pruned too) or keep (paper)",
        "exclude": "patterns of parameters that stay dense",
        "init": "weights under the mask: original, reinit, isometry",
        "batch_size": "examples a batch of the scores' pass",
        "sparsity seed": "of one trial by itself (0); a study sets them",
    },
    "optim": {"delay": "steps that gradients are late (0)"},
    "local": {
        "workers": "networks that train apart (1)",
        "steps start": "between two meetings (1); before the first (0)",
        "outer_learning_rate outer_momentum outer_nesterov": "",
    },
    "smoothness": {
        "interval": "steps between two measurements; null: none",
        "examples": "training examples that they take (all)",
        "noise": "the noise of the gradient too (false)",
        "delta last batch_size floor": "details",
    },
    "storage": {
        "folder": "of databases, artifacts, figures, reports (mlruns)",
        "optuna": "URL of the trials (sqlite in FOLDER/study.db)",
        "mlflow": "URI of the view (sqlite in FOLDER/mlflow.db)",
    },
}
HELPED = tuple(USAGE)
ONE = ("fit", "validate", "test")  # that train or evaluate one trial: what is searched is read over


def text(verb: str) -> str:
    """The help of a verb."""
    lines = [f"usage: lit-dps {verb} FILE [--KEY VALUE ...]", "", USAGE[verb], ""]
    lines += [_line(option, said) for option, said in (OPTIONS[verb] | COMMON).items()]
    lines += ["Keys of FILE are options too: --goal.error 0.1 --study.space.model.lr.high 0.3"]
    for heading, said in SECTIONS.items():
        if heading == "study" and verb in ONE:
            lines.append(
                "study: read over, but for the name of the MLflow experiment, study.workload"
            )
            continue
        lines.append(f"{heading}: {said}")
        for section in heading.split(", "):
            lines += [
                _line(_options(section, names), meaning)
                for names, meaning in KEYS.get(section, {}).items()
            ]
    return "\n".join(lines)


def _options(section: str, names: str) -> str:
    first, *others = names.split()
    return " ".join([f"--{section}.{first}", *(f".{name}" for name in others)])


def _line(option: str, said: str) -> str:
    return f"  {option:26}  {said}".rstrip()
