"""The command line. It finds the verb, and imports nothing slow before the verb is known."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from lit_dps.core.exit_codes import ExitCode, exit_code_lines

if TYPE_CHECKING:  # its import takes time
    from lit_dps.cli.command_line import CommandLine

# The modules of the verbs, in the order of `lit-dps --help`.
VERBS = (
    "fit",
    "validate",
    "test",
    "study",
    "advise",
    "calibration",
    "masks",
    "analyze",
    "replicate",
    "figures",
    "configs",
    "doctor",
    "init",
    "merge",
    "migrate",
    "ui",
)
REPORTS = ("analyze", "figures")  # verbs that print their progress at a terminal
# Verbs that need PyTorch and Lightning, whose imports take seconds.
TRAIN = ("fit", "validate", "test", "study", "advise", "masks", "init")
# When the last command began, on the monotonic clock. Its imports count towards its budget.
began = time.monotonic()


def main(argv: list[str] | None = None) -> int:
    """Run a command line, and return its exit code, an `ExitCode`."""
    global began
    began = time.monotonic()
    is_whole_process = argv is None
    if argv is None:
        argv = sys.argv[1:]
    leave_if_unguarded()
    if argv and argv[0] == "--version":
        from lit_dps import __version__

        print(__version__)
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(_list_of_verbs())
        if not argv:
            return ExitCode.REFUSED
        return 0
    if argv[0] not in VERBS:
        return _refuse(_unknown_verb(argv[0]))
    if imports_user_code(argv):
        append_current_folder()
    code = _run(argv)
    if is_whole_process and code == ExitCode.INTERRUPTED:
        # The process ends. Another signal would only print a traceback of its last steps, or change
        # the exit code.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return code


def _list_of_verbs() -> str:
    """Return the help of `lit-dps`: a line for each verb, from its docstring."""
    from lit_dps.cli.verbs import summary

    codes = "\n".join(exit_code_lines())
    verbs = "\n".join(f"  {verb:12} {summary(verb)}" for verb in VERBS)
    return (
        "usage: lit-dps VERB [FILE] [--KEY VALUE ...]\n\n"
        "Measures how batch size and sparsity affect the number of training steps.\n\n"
        f"{verbs}\n\n"
        f"Exit codes:\n{codes}\n\n"
        "lit-dps VERB --help lists the options of a verb.\n"
        "To begin: lit-dps configs quickstart, then lit-dps study quickstart.yaml"
    )


def _unknown_verb(word: str) -> str:
    """Return the message for a word that is no verb."""
    from lit_dps.core.text import closest_name

    if word.endswith((".yaml", ".yml")):
        near: str | None = f"study {word}"
    else:
        near = closest_name(word, VERBS)
    hint = ""
    if near is not None:
        hint = f"did you mean lit-dps {near}? "
    return f"unknown verb {word!r}; {hint}there are {', '.join(VERBS)}"


def imports_user_code(argv: list[str]) -> bool:
    """Return True if a command may import the user's modules, by class paths or by `--only`."""
    if argv[0] == "figures":
        return any(word.partition("=")[0] == "--only" for word in argv[1:])
    return argv[0] in TRAIN


def append_current_folder() -> None:
    """Append the current folder to `sys.path`, unless the path contains it.

    The folder comes last, so that a file `yaml.py` or `random.py` replaces no installed module.
    """
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def leave_if_unguarded() -> None:
    """End a process that runs a user's script again before the function that it was started for.

    multiprocessing itself ends such a process, with a longer message.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    from lit_dps.core.errors import Unguarded

    # A process of this package prints nothing: the process that started it reports the error once.
    if not process.name.startswith(Unguarded.PROCESS_PREFIX):
        _refuse(str(Unguarded()))
        sys.stderr.flush()
    os._exit(Unguarded.EXIT_CODE)


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """End the process at Ctrl-C, because an imported library may swallow KeyboardInterrupt."""

    def leave(signum: int, frame: object) -> None:
        os.write(2, b"\nlit-dps: interrupted\n")
        os._exit(ExitCode.INTERRUPTED)

    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    # Otherwise the caller handles the signal.
    if is_main_thread and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
    else:
        yield


def _run(argv: list[str]) -> int:
    """Run the verb of a command line, and return the exit code."""
    from lit_dps.core.errors import UserError
    from lit_dps.parallel.process import Interrupted

    command = None
    try:
        if _prints_help(argv):
            return 0
        from lit_dps.cli.command_line import CommandLine

        words = list(argv)
        if "--help-all" in words:
            words[words.index("--help-all")] = "--help"
        command = CommandLine(words)
        return _run_command(command)
    except UserError as error:
        message = str(error)
        # Of a command that cannot be read, only the words are known.
        urls = [word for word in argv if "://" in word]
        if command is not None:
            message = command.with_source(error)
            urls = command.urls
        return _refuse(without_secrets(message, urls))
    except SystemExit as error:
        from lit_dps.core.errors import has_user_frame, place_in_user_code

        if not has_user_frame(error):  # help, and errors of jsonargparse
            raise
        place = place_in_user_code(error)
        guard = 'if __name__ == "__main__":'
        return _refuse(f"your code ends the process{place}; put this line below {guard}")
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        # The interpreter flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, Interrupted):
        # While a study runs, it handles signals itself.
        print("\nlit-dps: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _prints_help(argv: Sequence[str]) -> bool:
    """Print our help of a verb, if the command asks for help and there is one."""
    if not {"-h", "--help"} & {*argv[1:]}:
        return False
    from lit_dps.cli.help import HELPED, text

    if argv[0] not in HELPED:
        return False
    print(text(argv[0]), flush=True)
    return True


def _run_command(command: CommandLine) -> int:
    """Check the keys of a command, and run its verb."""
    from lit_dps.cli.command_line import CONFIGURED
    from lit_dps.cli.key_checks import check_command
    from lit_dps.core.progress_line import one_wait

    command.warn_of_former_keys()
    # A log has no use for this line.
    trains = command.verb in TRAIN and not command.reads_runs
    if trains and sys.stderr.isatty():
        print(
            "lit-dps: reading the configuration and loading PyTorch ...",
            file=sys.stderr,
            flush=True,
        )
    module = command.verb
    if command.is_retraining:
        module = "retrain"
    if command.reads_runs:
        module = "advise_runs"
    elif command.verb in CONFIGURED:
        check_command(command)
    with _ended_by_interrupt():
        verb = import_module(f"lit_dps.cli.{module}")
    with ExitStack() as stack:
        if command.verb in REPORTS:
            stack.enter_context(one_wait(began))
        code = verb.main(command) or 0
    sys.stdout.flush()  # raises BrokenPipeError here rather than at exit
    return code


def without_secrets(message: str, urls: Iterable[str]) -> str:
    """Return a message with *** in place of the secrets of these URLs."""
    from lit_dps.storage.urls import scrubbed_of

    for url in urls:
        message = scrubbed_of(message, url)
    return message


def _refuse(message: str) -> int:
    from lit_dps.core.text import escape, for_terminal

    line = f"lit-dps: error: {escape(' '.join(message.split()))}"
    print(for_terminal(line, stream=sys.stderr), file=sys.stderr)
    return ExitCode.REFUSED
