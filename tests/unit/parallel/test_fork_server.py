"""Workers and ranks are forked from a server that imports what they need, and does nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lit_dps.parallel import fork_server as processes
from lit_dps.study.workers import warm_up
from tests.support.processes import forked_by, runs, servers_of

pytestmark = pytest.mark.skipif(
    processes.METHOD != "forkserver", reason="processes are spawned here"
)
ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}


@pytest.fixture(autouse=True, scope="module")
def server():
    """A server of these tests' own."""
    forkserver._forkserver._stop()
    yield forkserver._forkserver
    forkserver._forkserver._stop()


def tell_all(sent) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    sent.send(
        {
            "process": multiprocessing.current_process().name,
            "variable": os.environ.get("LIT_DPS_TEST"),
            "path": os.environ.get("PYTHONPATH"),
            "folder": os.getcwd(),
            "blocked": {signal.SIGINT, signal.SIGTERM} & blocked,
            "cuda": torch.cuda.is_initialized(),
        }
    )


def told(function, *args) -> object:
    received, sent = processes.context().Pipe(duplex=False)
    process = processes.start(function, "worker 0", (sent, *args))
    sent.close()
    try:
        assert received.poll(100), "the process hangs"
        return received.recv()
    finally:
        process.join(10)
        process.kill()


@pytest.mark.long
def test_each_has_the_environment_of_its_start_and_no_ctrl_c(monkeypatch, tmp_path, server):
    for value in ("first", "second"):
        monkeypatch.setenv("LIT_DPS_TEST", value)
        monkeypatch.chdir(tmp_path)
        assert told(tell_all) == {
            "process": "lit-dps worker 0",
            "variable": value,
            "path": os.environ.get("PYTHONPATH"),
            "folder": str(tmp_path),
            "blocked": {signal.SIGINT},
            "cuda": False,
        }
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), (
        "this process is as it was"
    )
    assert len(os.listdir(f"/proc/{server._forkserver_pid}/task")) == 1, (
        "a server with threads is not to be forked"
    )


def import_all(sent) -> None:
    import lit_dps.study.workers

    assert lit_dps.study.workers.__name__ in sys.modules
    sent.send(time.process_time())  # its own CPU seconds since the fork, also on a busy machine


def test_only_the_first_start_takes_seconds():
    processes.start_server(import_all, warm_up)  # whose module imports all that trains
    told(import_all)
    assert told(import_all) < 2


def train(sent, threads: int) -> None:
    torch.set_num_threads(threads)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10)
    )
    for _ in range(3):
        net(torch.randn(64, 3, 32, 32)).square().mean().backward()
    sent.send((torch.get_num_threads(), len(os.listdir("/proc/self/task"))))


def test_a_forked_process_trains_with_several_threads():
    for _ in range(2):
        threads, tasks = told(train, 3)
        assert threads == 3 and tasks >= 3


NOISE = 0.0


class Noisy(Dataset):
    """Reads a global variable."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> float:
        return i + NOISE


def load(sent) -> None:
    global NOISE
    NOISE = 100.0
    loader = DataLoader(
        Noisy(), 4, num_workers=2, collate_fn=lambda examples: torch.tensor(examples)
    )
    sent.send(torch.cat(list(loader)).tolist())


def test_a_process_may_have_workers_of_a_loader():
    """They start as in the first process: a fork knows what the process knows."""
    assert multiprocessing.get_start_method() == "fork", "the default of Python before 3.14"
    assert told(load) == [100 + i for i in range(8)]


@pytest.mark.long  # test_gpus.py has the imports of a worker
def test_the_server_asks_no_gpu_for_anything():
    """A fork of a process that has asked CUDA for as much as the number of devices cannot use
    it."""
    code = """
import torch
def asked(*args, **kw): raise SystemExit("a GPU was asked")
torch._C._cuda_getDeviceCount = torch.cuda.is_available = torch.cuda.device_count = asked
import lit_dps.cli.fit, lit_dps.parallel.launch, lit_dps.study.workers
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, env=ENVIRONMENT, timeout=100
    )


def script(folder: Path, body: str) -> subprocess.Popen:
    """Starts a script that starts two processes, as the leader of a process group."""
    (folder / "slow.py").write_text("import time\ndef wait(): time.sleep(200)\ntime.sleep(1)\n")
    lines = [
        "import os, sys, signal, time",
        "from lit_dps.parallel import fork_server as processes",
        "from slow import wait",
    ]
    lines += ["if __name__ == '__main__':", *(f"    {line}" for line in body.splitlines())]
    (folder / "main.py").write_text("\n".join(lines))
    return subprocess.Popen(
        [sys.executable, "main.py"],
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def eventually(condition, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


@pytest.mark.parametrize("victim", ["command", "server"])
def test_nobody_is_left_behind_when_one_is_killed(tmp_path, victim):
    main = script(
        tmp_path,
        "a, b = (processes.start(wait, f'worker {i}', ()) for i in range(2))\na.join()\nb.join()",
    )
    assert eventually(lambda: len(forked_by(main.pid)) == 2)
    everyone = [*servers_of(main.pid), *forked_by(main.pid)]
    os.kill(main.pid if victim == "command" else everyone[0], signal.SIGKILL)
    assert eventually(lambda: not any(map(runs, everyone)))
    assert main.wait(30) == (-9 if victim == "command" else 0)


@pytest.mark.long
def test_ctrl_c_is_for_the_command_alone_also_while_the_server_imports(tmp_path):
    body = """
signal.signal(signal.SIGINT, lambda *_: print("told", file=sys.stderr, flush=True))
processes.start_server(wait)
print("begun", file=sys.stderr, flush=True)
process = processes.start(wait, "worker 0", ())
time.sleep(0.5)
print(process.exitcode, file=sys.stderr, flush=True)
process.kill()
""".strip()
    main = script(tmp_path, body)
    assert main.stderr.readline() == "begun\n"
    for _ in range(5):
        os.killpg(main.pid, signal.SIGINT)
        time.sleep(0.3)
    said = main.stderr.read().splitlines()
    assert main.wait(30) == 0
    assert set(said) == {"told", "None"}, "no traceback, and the process lives"
