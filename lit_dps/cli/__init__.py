"""The command line: finds the verb, and imports nothing heavy before it is known."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import ModuleType

VERBS = {
    "fit": (
        "lit_dps.cli.fit",
        "train one trial; with --of STUDY --cell B=32,S=0 that of a study's K* again",
    ),
    "validate": ("lit_dps.cli.fit", "evaluate a checkpoint on the validation split"),
    "test": ("lit_dps.cli.fit", "evaluate a checkpoint on the test split"),
    "study": (
        "lit_dps.cli.study",
        "run a study of batch sizes and sparsities, or take it up again",
    ),
    "advise": ("lit_dps.cli.advise", "which batch size, how many devices, how long, at what cost"),
    "calibration": (
        "lit_dps.cli.calibration",
        "how well advice predicted the runs of fit that followed it",
    ),
    "masks": (
        "lit_dps.cli.masks",
        "what pruning methods keep of each layer at initialization, without training",
    ),
    "analyze": (
        "lit_dps.cli.analyze",
        "table, scaling law and figures of a study, also while it runs",
    ),
    "replicate": ("lit_dps.cli.replicate", "run the studies of the replication and write its page"),
    "figures": (
        "lit_dps.cli.figures",
        "the figures of a study, or of several and how they compare",
    ),
    "configs": (
        "lit_dps.cli.configs",
        "list the configuration files of the package, or copy one here",
    ),
    "merge": ("lit_dps.cli.merge", "take over trials of the same studies that were run elsewhere"),
    "ui": ("lit_dps.cli.ui", "browse studies in MLflow"),
}
REPORTS = ("analyze", "figures")  # verbs that print their progress at a terminal
# Verbs that need PyTorch and Lightning, whose imports take seconds.
TRAIN = ("fit", "validate", "test", "study", "advise", "masks")
INTERRUPTED = 130  # exit code, as in `lit_dps.parallel.process`, whose import takes time
began: float | None = (
    None  # the last command, on the monotonic clock: its imports count towards a budget
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line. Returns the exit code: 2 for what the user can mend, told in one
    line."""
    global began
    began = time.monotonic()
    is_whole_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    leave_if_unguarded()
    if argv and argv[0] == "--version":
        from lit_dps import __version__

        print(__version__)
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:11} {text}" for verb, (_, text) in VERBS.items())
        print(
            "usage: lit-dps VERB [FILE] [--KEY VALUE ...]\n\n"
            f"How batch size and sparsity rule the steps that training takes.\n\n{verbs}\n\n"
            "lit-dps VERB --help lists the options of a verb.\n"
            "To begin: lit-dps configs quickstart, then lit-dps study quickstart.yaml"
        )
        return 0 if argv else 2
    if argv[0] not in VERBS:
        from lit_dps.core.text import closest_name

        likely = (
            f"study {argv[0]}"
            if argv[0].endswith((".yaml", ".yml"))
            else closest_name(argv[0], VERBS)
        )
        near = f"did you mean lit-dps {likely}? " if likely else ""
        return _refuse(f"unknown verb {argv[0]!r}; {near}there are {', '.join(VERBS)}")
    if imports_user_code(argv):
        append_current_folder()
    code = _run(argv)
    if is_whole_process and code == INTERRUPTED:
        # The process ends. Another Ctrl-C would only print a traceback of its last steps.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def imports_user_code(argv: list[str]) -> bool:
    """Return True if a command may import the user's modules, by class paths or by `--only`."""
    options = [word.partition("=")[0] for word in argv[1:]]
    return argv[0] in TRAIN or (argv[0] == "figures" and "--only" in options)


def append_current_folder() -> None:
    """Append the current folder to `sys.path`, unless the path contains it.

    The folder comes last, so that a file `yaml.py` or `random.py` replaces no installed module.
    """
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def leave_if_unguarded() -> None:
    """Ends a process that runs a user's script again on its way to what it was started for, as
    multiprocessing does."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    from lit_dps.core.errors import Unguarded

    if not process.name.startswith(Unguarded.PROCESS_PREFIX):  # else who started it says so, once
        _refuse(str(Unguarded()))
        sys.stderr.flush()
    os._exit(Unguarded.EXIT_CODE)


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """End the process at Ctrl-C, because an imported library may swallow KeyboardInterrupt."""

    def leave(signum: int, frame: object) -> None:
        os.write(2, b"\nlit-dps: interrupted\n")
        os._exit(INTERRUPTED)

    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # the caller has its own handler
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _import_verb(name: str) -> ModuleType:
    if threading.current_thread() is not threading.main_thread():
        return import_module(name)
    with _ended_by_interrupt():
        return import_module(name)


def _run(argv: list[str]) -> int:
    from lit_dps.core.errors import UserError
    from lit_dps.core.progress_line import one_wait
    from lit_dps.parallel.process import Interrupted

    try:
        if {"-h", "--help"} & {*argv[1:]}:
            from lit_dps.cli.help import HELPED, text

            if argv[0] in HELPED:
                print(text(argv[0]), flush=True)
                return 0
        argv = ["--help" if word == "--help-all" else word for word in argv]
        from lit_dps.cli.command_line import expand_short_forms

        argv = expand_short_forms(argv)
        if (
            argv[0] in TRAIN and sys.stderr.isatty()
        ):  # whoever waits at a terminal; a log has no use for it
            print(
                "lit-dps: reading the configuration and loading PyTorch ...",
                file=sys.stderr,
                flush=True,
            )
        if argv[0] in TRAIN:
            from lit_dps.cli.key_checks import OPTIONS, check_shape, refuse_unknown

            check_shape(argv[1:], argv[0])
            if argv[0] in OPTIONS:
                refuse_unknown(argv[1:], argv[0])
        again = argv[0] == "fit" and any(word.partition("=")[0] == "--of" for word in argv)
        verb = _import_verb("lit_dps.cli.retrain" if again else VERBS[argv[0]][0])
        with one_wait(began) if argv[0] in REPORTS else nullcontext():
            code = verb.main(argv) or 0
        sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
        return code
    except UserError as error:
        return _refuse(without_secrets(str(error), argv))
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        # The interpreter flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (
        KeyboardInterrupt,
        Interrupted,
    ):  # before or after the run of a study, which handles signals itself
        print("\nlit-dps: interrupted", file=sys.stderr)
        return INTERRUPTED


def without_secrets(message: str, argv: list[str]) -> str:
    """Return a message with *** in place of the secrets of all URLs of a command.

    URLs are in the command and in its configuration files.
    """
    from lit_dps.cli.command_line import options_of, read_config
    from lit_dps.storage.urls import scrubbed_of

    urls = [word for word in argv if "://" in word]
    for option in options_of(argv):
        if option.name.startswith("--storage."):
            urls.append(option.text)
        if option.is_config:
            storage = read_config(option.text).get("storage")
            if isinstance(storage, dict):
                urls += [str(storage[key]) for key in ("optuna", "mlflow") if storage.get(key)]
    for url in urls:
        message = scrubbed_of(message, url)
    return message


def _refuse(message: str) -> int:
    from lit_dps.core.text import escape

    print(f"lit-dps: error: {escape(' '.join(message.split()))}", file=sys.stderr)
    return 2
