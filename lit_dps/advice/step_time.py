"""Seconds of an optimizer step on one or several devices: fitted where it was timed, predicted
where it was not.

On a device, t(m) = (a^p + (b m)^p)^(1/p) over the local batch m: p = 1 is a line, a larger p a flat
stretch up to a knee at m = a / b and a line beyond it. What the law misses at the sizes timed is
interpolated between them: caches and memory bend it where no law says so. Several devices exchange
gradients while they compute, which slows computing by a factor c: ((c t(m))^q + s^q)^(1/q), s =
alpha + beta (n - 2) for n devices, of one node or of several: the form of Pollux (Qiao et al.
2021), with c = 1 there. Few points tell neither c nor q: both are drawn to what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from lit_dps.advice.link import Link
from lit_dps.core.format import number_text, time_text

SHARPEST = 16.0  # p and q; beyond, the knee is a corner
KNEE_FROM = 4  # local batch sizes that a knee needs, which is one constant more than a line
EXACT = 0.005  # misfit of a line that leaves nothing for a knee to explain
BETTER = 0.8  # a knee is taken where it lowers the misfit below this share of the line's
TYPICAL_ERROR = 0.05  # of log t: the least that a prediction is uncertain by (docs/advice-law.md)
TOGETHER = 0.1  # likewise, of several devices
# Usual log c and log q, how far off they may be, and the error of a point: exchanges run beside the
# backward pass
SLOWED, OVERLAP, POINT = (0.1, 0.1), (math.log(4), 0.7), 0.01
PER_DOUBLING = 0.1  # what is added to it for each doubling beyond the local batches that were timed
PER_DOUBLING_OF_DEVICES = (
    0.4  # likewise beyond the numbers of devices: public clusters were off by so much
)


class Timed(NamedTuple):
    """A step as it was timed: examples a device takes at once, seconds, devices, nodes, and
    micro-batches a step."""

    local_batch: float
    seconds: float
    devices: int = 1
    nodes: int = 1
    accumulation: int = 1


class Seconds(NamedTuple):
    """Of a step, with 95 % limits; `known`: fitted, extrapolated (beyond what was timed) or
    predicted (`Link`)."""

    value: float
    low: float
    high: float
    known: str


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        a, b, p: Of one device [seconds, seconds an example, -].
        misfit: Root mean square of the residuals of log t on one device, over the points less the
            constants; nan with as many points as constants.
        local: The smallest and largest local batch that was timed on one device.
        exchange: alpha, beta [seconds] of one node (False) and of several (True), as far as they
            were timed.
        q: Overlap of computing and exchange; 1 is none.
        slowed: How many times as long a device computes where it exchanges meanwhile (c).
        devices: Most devices timed, of one node (False) and of several (True).
        together: As `misfit`, of steps on several devices.
        link: What is assumed where no exchange was timed.
        largest: The largest local batch that fits the memory; a larger one is accumulated.
        node: Devices a node has; None where all are in one.
        off: Local batches timed on one device, ascending, and the log by which a step took longer
            than the law has it.
    """

    a: float
    b: float
    p: float
    misfit: float
    local: tuple[float, float]
    exchange: dict[bool, tuple[float, float]]
    q: float = 1.0
    slowed: float = 1.0
    devices: dict[bool, int] | None = None
    together: float = math.nan
    link: Link | None = None
    largest: int | None = None
    node: int | None = None
    off: tuple[tuple[float, float], ...] = ()

    def of_device(self, local_batch):
        """Seconds of one device for a local batch (number or array), nothing exchanged."""
        m = np.asarray(local_batch, float)
        law = _either(self.a, self.b * m, self.p)
        if not self.off:
            return law
        sizes, missed = np.transpose(self.off)
        return law * np.exp(np.interp(np.log(m), np.log(sizes), missed))

    def at(self, batch_size: float, devices: int = 1) -> Seconds | None:
        """A step of a global batch on so many devices; None where it is not known, or devices
        outnumber examples.

        A local batch above `largest` is accumulated in the fewest equal parts; only the last one
        exchanges.
        """
        local = batch_size / devices
        if local < 1:
            return None
        parts = 1 if self.largest is None else math.ceil(local / self.largest)
        single = float(self.of_device(local / parts))
        beyond = max(
            0.0, math.log2(local / parts / self.local[1]), math.log2(self.local[0] * parts / local)
        )
        known, misfits = "fitted" if beyond == 0 else "extrapolated", [self.misfit]
        seconds, spread = parts * single, TYPICAL_ERROR
        if devices > 1:
            far = self.node is not None and devices > self.node
            if far in self.exchange:
                alpha, beta = self.exchange[far]
                last = float(_either(self.slowed * single, alpha + beta * (devices - 2), self.q))
                misfits += [self.together, TOGETHER]
                if (more := devices / self.devices[far]) > 1:
                    known, spread = (
                        "extrapolated",
                        math.hypot(spread, PER_DOUBLING_OF_DEVICES * math.log2(more)),
                    )
            elif self.link is not None:
                last, known = single + self.link.seconds(devices), "predicted"
                spread = math.hypot(
                    spread, math.log(2) * self.link.seconds(devices) / last / 2
                )  # within a factor of 2
            else:
                return None
            seconds += last - single
        spread = math.hypot(
            max(spread, *(m for m in misfits if not math.isnan(m)), 0.0), PER_DOUBLING * beyond
        )
        wide = math.exp(1.96 * spread)
        # Beyond the largest batch timed a device may be full from there on: then a step takes time
        # in proportion to it.
        full = (
            float(self.of_device(self.local[1])) * local / self.local[1]
            if local / parts > self.local[1]
            else 0.0
        )
        return Seconds(
            seconds, seconds / wide, max(seconds, seconds - parts * single + full) * wide, known
        )

    def describe(self) -> str:
        """The model in a line."""
        kind = (
            "a line"
            if self.p == 1
            else f"flat up to about {number_text(self.a / self.b)} examples, then a line"
        )
        misfit = "" if math.isnan(self.misfit) else f", misfit {self.misfit:.1%}"
        least, most = self.local
        timed = f"timed at {least:g} to {most:g} examples a device"
        return (
            f"a step takes {time_text(self.a)} and {time_text(self.b)} an example: "
            f"{kind}{misfit}, {timed}"
        )


def fit_step_time(
    timed: Sequence[Timed],
    link: Link | None = None,
    largest: int | None = None,
    node: int | None = None,
) -> StepTime:
    """The model of some timed steps, by least squares of log t.

    Args:
        timed: At least two local batch sizes on one device; several devices as far as there are
            any.
        link, largest, node: As in `StepTime`.

    Raises:
        ValueError: for fewer, or numbers that are not positive and finite.
    """
    rows = [Timed(*row) for row in timed]
    if not all(math.isfinite(x) and x > 0 for row in rows for x in row):
        raise ValueError("what was timed must be positive and finite")
    alone = [row for row in rows if row.devices == 1]
    if len({row.local_batch for row in alone}) < 2:
        raise ValueError("a model of the step time needs 2 local batch sizes timed on one device")
    m, t, parts = (
        np.array([getattr(r, key) for r in alone], float)
        for key in ("local_batch", "seconds", "accumulation")
    )
    a, b, p, misfit = _device(m, t / parts)
    log_off = np.log(t / parts / _either(a, b * m, p))
    off = tuple((float(size), float(log_off[m == size].mean())) for size in np.unique(m))
    model = StepTime(
        a, b, p, misfit, (m.min(), m.max()), {}, link=link, largest=largest, node=node, off=off
    )
    several = [row for row in rows if row.devices > 1]
    return _with_exchange(model, several) if several else model


def _either(x, y, p):
    """(x^p + y^p)^(1/p) without overflow."""
    most, least = np.maximum(x, y), np.minimum(x, y)
    return most * (1 + (least / most) ** p) ** (1 / p)


def _device(m: np.ndarray, t: np.ndarray) -> tuple[float, float, float, float]:
    """a, b, p and the misfit of one device."""
    begin = np.log([t.min() / 2, np.median(t / m) / 2])

    def misfit(x):
        return np.log(_either(math.exp(x[0]), math.exp(x[1]) * m, x[2] if len(x) > 2 else 1.0) / t)

    def spread(found):
        free = len(m) - len(found.x)
        return math.sqrt(float((found.fun**2).sum()) / free) if free > 0 else math.nan

    best = least_squares(misfit, begin)
    if np.unique(m).size >= KNEE_FROM and spread(best) > EXACT:
        limits = ([-np.inf, -np.inf, 1], [np.inf, np.inf, SHARPEST])
        bent = min(
            (least_squares(misfit, [*begin, p], bounds=limits) for p in (1.5, 4)),
            key=lambda found: found.cost,
        )
        if spread(bent) < BETTER * spread(best):
            best = bent
    p = float(best.x[2]) if len(best.x) > 2 else 1.0
    return float(np.exp(best.x[0])), float(np.exp(best.x[1])), p, spread(best)


def _with_exchange(model: StepTime, rows: Sequence[Timed]) -> StepTime:
    """The model with alpha and beta of each kind of connection that was timed, and their common
    q."""
    kinds = sorted({row.nodes > 1 for row in rows})
    far = np.array([kinds.index(row.nodes > 1) for row in rows])
    n, m, t, parts = (
        np.array([getattr(r, key) for r in rows], float)
        for key in ("devices", "local_batch", "seconds", "accumulation")
    )
    single = model.of_device(m)
    sloped = [len({row.devices for row in rows if (row.nodes > 1) == kind}) > 1 for kind in kinds]
    scale = float(np.median(single))

    def exchanged(x):
        alpha, beta = (
            np.exp(x[2 : 2 + len(kinds)]),
            np.where(sloped, np.exp(x[2 + len(kinds) :]), 0.0),
        )
        exchange = scale * (alpha[far] + beta[far] * (n - 2))
        return np.log(
            ((parts - 1) * single + _either(math.exp(x[0]) * single, exchange, math.exp(x[1]))) / t
        )

    def misfit(x):
        known = [
            (value - usual) / spread
            for value, (usual, spread) in zip(x, (SLOWED, OVERLAP), strict=False)
        ]
        return np.concatenate([exchanged(x) / POINT, known])

    low, high = (
        [0, 0, *(2 * len(kinds)) * [-14]],
        [math.log(2), math.log(SHARPEST), *(2 * len(kinds)) * [7]],
    )
    starts = [[0.1, math.log(q), *len(kinds) * [-1.0], *len(kinds) * [-5.0]] for q in (1.2, 4.0)]
    best = min(
        (least_squares(misfit, x, bounds=(low, high)) for x in starts), key=lambda found: found.cost
    )
    alpha, beta = (
        scale * np.exp(best.x[2 : 2 + len(kinds)]),
        scale * np.exp(best.x[2 + len(kinds) :]),
    )
    free = len(t) - 2 - len(kinds) - sum(sloped)
    most = {kind: max(row.devices for row in rows if (row.nodes > 1) == kind) for kind in kinds}
    return StepTime(
        **{
            **vars(model),
            "exchange": {
                k: (float(alpha[i]), float(beta[i]) if sloped[i] else 0.0)
                for i, k in enumerate(kinds)
            },
            "q": math.exp(best.x[1]),
            "slowed": math.exp(best.x[0]),
            "devices": most,
            "together": math.sqrt(float((exchanged(best.x) ** 2).sum()) / free)
            if free > 0
            else math.nan,
        }
    )
