"""Condenses the recordings of the authors' code to what the tests compare with, so that they come
with the tests.

    python -m tests.parity.condense FOLDER_OF_THE_RECORDINGS

Each recording becomes NAME.npz.xz in tests/parity/reference. Initial weights are kept to the bit,
once where runs share them. Saliency and final weights are rounded to a grid that is far finer than
what the tests allow, and orders are kept as their digests. The recordings themselves are read in
place of these where `LIT_DPS_SHARED` names their folder.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import sys
from pathlib import Path

import numpy as np

KEPT = Path(__file__).with_name("reference")
GRID = (
    1e-5  # of the largest saliency, of which the tests allow ten times this; of weights, 200 times
)
WANTED = {  # by recording, the arrays that the tests read
    "cifar-10-resnet-8-seed0": ("w0", "snip"),
    "mnist-simple-cnn-seed0": ("w0", "snip"),
    "fashion-mnist-simple-cnn-seed0": ("w0", "snip"),
    "mnist-simple-cnn-seed0-sub10000": ("w0",),
    "lipschitz-mnist-s0.0": ("losses",),
    "lipschitz-mnist-s0.9": ("losses",),
    "traj-cifar-10-resnet-8-nesterov-b128-s0.0-lr0.05-linear20-0.01-seed0": (
        "losses",
        "val_err",
        "w0",
    ),
    "traj-fashion-mnist-simple-cnn-momentum-b128-s0.0-lr0.01-seed0": (
        "losses",
        "val_err",
        "w0",
        "mask",
        "w1",
    ),
    "traj-fashion-mnist-simple-cnn-momentum-b128-s0.9-lr0.01-seed0": (
        "losses",
        "val_err",
        "w0",
        "mask",
        "w1",
    ),
    "data-order-cifar-10": ("",),
    "data-order-mnist-and-fashion-mnist": ("",),
}


def digest(array: np.ndarray) -> np.ndarray:
    """The SHA-256 of whole numbers."""
    return np.frombuffer(hashlib.sha256(array.astype("<i8").tobytes()).digest(), np.uint8)


def restored(name: str) -> dict[str, np.ndarray]:
    """The arrays of one condensed recording."""
    with np.load(io.BytesIO(lzma.decompress((KEPT / f"{name}.npz.xz").read_bytes()))) as stored:
        arrays = dict(stored)
    if "initial" in arrays:
        arrays |= restored(str(arrays.pop("initial")))
    scales = {
        key.removesuffix("_grid"): float(arrays.pop(key))
        for key in list(arrays)
        if key.endswith("_grid")
    }
    for prefix, grid in scales.items():
        for key in [key for key in arrays if key.startswith(f"{prefix}_")]:
            arrays[key] = (arrays[key] * grid).astype(np.float32)
    return arrays


def condense(source: Path) -> None:
    """Writes all of them."""
    KEPT.mkdir(exist_ok=True)
    shared: dict[bytes, str] = {}
    for name, prefixes in WANTED.items():
        with np.load(source / f"{name}.npz") as stored:
            arrays = dict(stored)
        found: dict[str, np.ndarray] = {}
        for prefix in prefixes:
            part = {
                key: a
                for key, a in arrays.items()
                if key == prefix or key.startswith(f"{prefix}_" * bool(prefix))
            }
            if prefix == "":
                part = {key: digest(array) for key, array in part.items()}
            elif prefix == "w0":
                text = b"".join(part[key].tobytes() for key in sorted(part))
                if text not in shared:
                    shared[text] = f"initial-{len(shared)}"
                    _write(shared[text], part)
                part = {"initial": np.array(shared[text])}
            elif prefix in ("snip", "w1"):
                scale = (
                    max(np.abs(array).max() for array in part.values()) if prefix == "snip" else 1.0
                )
                grid = GRID * float(scale)
                part = {key: np.rint(array / grid).astype(np.int32) for key, array in part.items()}
                part[f"{prefix}_grid"] = np.array(grid)
            found |= part
        _write(name, found)
    for name in ("mnist.jsonl", "lipschitz.jsonl"):
        shutil.copyfile(source / name, KEPT / name)


def _write(name: str, arrays: dict[str, np.ndarray]) -> None:
    whole = io.BytesIO()
    np.savez(whole, **arrays)
    (KEPT / f"{name}.npz.xz").write_bytes(
        lzma.compress(whole.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    )


if __name__ == "__main__":
    condense(Path(sys.argv[1]))
