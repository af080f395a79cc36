"""The settings of torch for equal results on a GPU are as before afterwards, however the user has
made them."""

from __future__ import annotations

import pytest

from tests.e2e.commands import run_forked

CHECK = """
import torch
from lit_dps.training.deterministic import deterministic_kernels, full_float32
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
SETTING
def state():
    values = [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark]
    for read in (lambda: matmul.allow_tf32, lambda: cudnn.allow_tf32, torch.get_float32_matmul_precision):
        try:
            values.append(read())
        except RuntimeError:
            values.append("cannot be read")
    return values
before = state()
with full_float32(), deterministic_kernels():
    if "cannot be read" in before:
        assert {matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} == {"ieee"}
    else:
        assert not matmul.allow_tf32 and not cudnn.allow_tf32
    assert torch.are_deterministic_algorithms_enabled() and cudnn.deterministic and not cudnn.benchmark
assert state() == before, (before, state())
"""
SETTINGS = [
    "matmul.allow_tf32 = True; cudnn.benchmark = True; torch.use_deterministic_algorithms(True)",
    "matmul.fp32_precision = 'tf32'",
    "cudnn.conv.fp32_precision = 'ieee'",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_kept(tmp_path, setting):
    """Each in a process of its own, because torch refuses to mix its old and its new settings."""
    (tmp_path / "check.py").write_text(CHECK.replace("SETTING", setting))
    done = run_forked(tmp_path, ["check.py"])
    assert done.returncode == 0, done.stderr
