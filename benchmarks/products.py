"""Gradients of many stacked networks: convolutions by groups (`torch.vmap`) beside matrix products,
and one network.

`python -m benchmarks.products` prints a table: Simple-CNN on images of noise, forward and backward,
without an update. With `--tf32` convolutions and products may round to TF32, as PyTorch's
convolutions do on a GPU by default.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call, vmap

from benchmarks.numbers import Sample, interleaved
from benchmarks.step import now
from benchmarks.text import spread, table, times
from lit_dps.engines.stack import ConvolutionsAsProducts
from lit_dps.models import SimpleCNN
from lit_dps.study.hardware import hardware

ALONE = (16, 256, 2048, 4096)  # batch sizes of one network
STACKED = ((100, 2), (100, 16), (25, 256), (100, 256))  # networks, batch size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="Of a repeat, at least.")
    parser.add_argument("--tf32", action="store_true")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = options.tf32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        _row(rows, size, device, options) for rows, size in (*((1, b) for b in ALONE), *STACKED)
    ]
    print(
        table(
            [
                "networks",
                "B",
                "groups, networks x steps/s",
                "products, networks x steps/s",
                "ratio",
            ],
            rows,
        )
    )
    print(
        f"\n{hardware()}, torch {torch.__version__}, {'TF32' if options.tf32 else 'full float32'}."
    )


def _row(networks: int, batch_size: int, device: str, options: argparse.Namespace) -> list[str]:
    module = SimpleCNN().to(device)
    stacked = {
        n: torch.stack([p.detach()] * networks).requires_grad_()
        for n, p in module.named_parameters()
    }
    x, y = (
        torch.randn(batch_size, 1, 28, 28, device=device),
        torch.randint(10, (batch_size,), device=device),
    )
    each = vmap(lambda weights: F.cross_entropy(functional_call(module, weights, (x,)), y))

    def rate(products: bool) -> float:
        begin, steps = now(device), 0
        while now(device) - begin < options.seconds:
            with ConvolutionsAsProducts() if products else nullcontext():
                loss = each(stacked).sum()
            torch.autograd.grad(loss, list(stacked.values()))
            steps += 1
        return networks * steps / (now(device) - begin)

    ways = {"groups": partial(rate, False), "products": partial(rate, True)}
    for way in ways.values():
        way()
    found: dict[str, Sample] = interleaved(ways, options.repeats)
    shown = [spread(found[name], "{:,.0f}".format) for name in ways]
    return [str(networks), str(batch_size), *shown, times(found["products"].over(found["groups"]))]


if __name__ == "__main__":
    main()
