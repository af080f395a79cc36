"""Sums over the kept weights of a convolution, compiled by Numba: forward, and its two gradients.

Tensors come in blocks of examples, the example innermost, so that a weight acts on a whole row of a
block at once: rows are contiguous, whatever weights are kept. Convolutions have stride 1 and no
padding. Shapes: `x` (blocks, channels * height * width * lanes), `y` (blocks, filters, rows,
columns * lanes), all float32. Kept weight j of filter o, with `first[o] <= j < first[o + 1]`, reads
the channel, row and column of `x` that begin at `offset[j]`; `line` is the length of a row of `x`.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numba import njit


def _compiled(function):
    # Sums may be taken in any order, so that they are vectorised. What is not finite stays so: no
    # "nnan" and "ninf".
    compiled = njit(fastmath={"contract", "reassoc", "nsz"})(function)
    with suppress(RuntimeError):  # nowhere to write it: each process compiles it then
        compiled.enable_caching()
    return compiled


@_compiled
def forward(x, bias, first, offset, weight, line, y):
    """Writes the output of the convolution into y."""
    blocks, filters, rows, columns = y.shape
    for block in range(blocks):
        image = x[block]
        for o in range(filters):
            for row in range(rows):
                out, start = y[block, o, row], row * line
                for i in range(columns):
                    out[i] = bias[o]
                j, end = first[o], first[o + 1]
                while (
                    j + 4 <= end
                ):  # four at a time: the output is loaded and stored a fourth as often
                    w0, w1, w2, w3 = weight[j], weight[j + 1], weight[j + 2], weight[j + 3]
                    x0, x1 = image[offset[j] + start :], image[offset[j + 1] + start :]
                    x2, x3 = image[offset[j + 2] + start :], image[offset[j + 3] + start :]
                    for i in range(columns):
                        out[i] += w0 * x0[i] + w1 * x1[i] + w2 * x2[i] + w3 * x3[i]
                    j += 4
                while j < end:
                    w0, x0 = weight[j], image[offset[j] + start :]
                    for i in range(columns):
                        out[i] += w0 * x0[i]
                    j += 1


@_compiled
def input_gradient(dy, first, offset, weight, line, dx):
    """Adds the gradient of the input to dx, given that of the output."""
    blocks, filters, rows, columns = dy.shape
    for block in range(blocks):
        image = dx[block]
        for o in range(filters):
            for row in range(rows):
                g, start = dy[block, o, row], row * line
                for j in range(first[o], first[o + 1]):
                    w, into = weight[j], image[offset[j] + start : offset[j] + start + columns]
                    for i in range(columns):
                        into[i] += w * g[i]


@_compiled
def weight_gradient(dy, x, first, offset, line, dw):
    """Adds the gradient of each kept weight to dw, shape (kept weights,), given that of the
    output."""
    blocks, filters, rows, columns = dy.shape
    for block in range(blocks):
        image = x[block]
        for o in range(filters):
            j, end = first[o], first[o + 1]
            while j + 2 <= end:
                s0, s1 = np.float32(0), np.float32(0)
                for row in range(rows):
                    g, start = dy[block, o, row], row * line
                    x0, x1 = image[offset[j] + start :], image[offset[j + 1] + start :]
                    for i in range(columns):
                        s0 += g[i] * x0[i]
                        s1 += g[i] * x1[i]
                dw[j] += s0
                dw[j + 1] += s1
                j += 2
            if j < end:
                s0 = np.float32(0)
                for row in range(rows):
                    g, x0 = dy[block, o, row], image[offset[j] + row * line :]
                    for i in range(columns):
                        s0 += g[i] * x0[i]
                dw[j] += s0
