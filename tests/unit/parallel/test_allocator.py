"""Whether a block that was freed is got again without the system mapping its pages anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from lit_dps.cli import fit
from lit_dps.cli.command_line import CommandLine
from lit_dps.parallel import process as runtime
from lit_dps.parallel.process import SWITCH, keep_freed_memory
from tests.e2e.commands import environment

BLOCK, TIMES = 64 * 2**20, 10
FAULTS = f"""
import ctypes, resource, sys
from lit_dps.parallel.process import keep_freed_memory
told = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    block = libc.malloc({BLOCK})
    ctypes.memset(block, 1, {BLOCK})
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TIMES}):
    use()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**setting: str) -> tuple[bool, int]:
    """Whether the allocator was told, and the page faults of using a block again and again."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env=environment() | setting,
        capture_output=True,
        text=True,
        check=True,
    )
    told, count = done.stdout.split()
    return told == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the GNU C library")
def test_freed_memory_is_used_again():
    told, kept = faults()
    off, mapped = faults(**{SWITCH: "0"})
    assert told and not off
    assert kept < 100 < BLOCK // 2**21 * TIMES <= mapped, (
        "each use maps its pages anew, of 2 MiB at most"
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_a_setting_of_the_users_own_holds(setting):
    assert not faults(**setting)[0]


def test_another_c_library_is_left_alone(monkeypatch):
    for name in (
        "MALLOC_MMAP_MAX_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "GLIBC_TUNABLES",
        SWITCH,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()


def test_every_process_of_a_study_and_a_fit_keeps_it(monkeypatch):
    told = []
    monkeypatch.setattr(runtime, "keep_freed_memory", lambda: told.append("study"))
    monkeypatch.setattr(fit, "keep_freed_memory", lambda: told.append("fit"))
    runtime.prepare_process()
    with pytest.raises(SystemExit):
        fit.main(CommandLine(["fit", "--help"]))
    assert told == ["study", "fit"]
