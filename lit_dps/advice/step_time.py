"""Seconds of an optimizer step on one or several devices: a model fitted to timed steps.

One device takes t(m) = (a^p + (b m)^p)^(1/p) for a local batch of m examples. With p = 1 this is a
line; a larger p gives a flat curve up to a knee at m = a / b, and a line beyond it. Residuals at
the timed sizes are interpolated between them, because caches and memory bend the curve further.

Several devices exchange gradients while they compute, which slows computing by a factor c:
((c t(m))^q + s^q)^(1/q) with s = alpha (1 + g log2(n / 2)) for n devices. Constants within a node,
on two nodes, and on more nodes differ: on public clusters an exchange on two nodes takes twice as
long as on three. Pollux (Qiao et al. 2021) has n - 2 in place of the logarithm, and c = 1. A few
points determine neither c, q nor g, so the fit draws them to usual values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from lit_dps.analysis.intervals import NORMAL_95
from lit_dps.analysis.tables import three_digits
from lit_dps.core.text import format_duration, number_text

MAX_EXPONENT = 16.0  # of p and q; beyond it the knee is a corner
# A knee is one constant more than a line. It needs this number of local batch sizes and a misfit of
# the line above this, and is taken if it lowers the misfit below this share of the line's.
MIN_SIZES_FOR_KNEE = 4
EXACT_MISFIT = 0.005
# Below this share of a step at the largest batch, the time of its examples is not resolved.
MIN_SHARE_OF_EXAMPLES = 0.01
KNEE_GAIN = 0.8
# The least standard error of log t of a prediction, on one and on several devices
# (docs/advice.md).
TYPICAL_ERROR = 0.05
TYPICAL_ERROR_TOGETHER = 0.1
# Added for each doubling beyond the timed local batches, and beyond the timed numbers of devices:
# predictions of public clusters were off by that much.
ERROR_PER_DOUBLING = 0.1
ERROR_PER_DOUBLING_OF_DEVICES = 0.2
# The usual log c and log q with their standard deviations. Most exchanges run beside the backward
# pass.
LOG_SLOWDOWN = (0.1, 0.1)
LOG_OVERLAP = (math.log(4), 0.7)
# The usual log g. A ring sends 2 (n - 1) / n of the gradients, so that g is 0.5 from 2 to 4
# devices, 0.38 on average up to 8, and 0.29 up to 16.
LOG_GROWTH = (math.log(0.35), 0.3)
MANY_NODES = 3  # this number of nodes and any larger one have the same constants
# If the exchange was timed on other numbers of nodes: a factor of 2 is two standard errors.
ERROR_OF_OTHER_NODES = math.log(2) / 2
# The error of log seconds between local batches timed on the same devices, and the error that they
# share, because it is of their connection. c and q follow from the first differences, g from
# differences between connections, so that all local batches together are one point for g.
POINT_ERROR = 0.01
CONNECTION_ERROR = 0.05
BYTES_PER_ELEMENT = 4  # of a gradient


@dataclass(frozen=True)
class Link:
    """An assumed connection between devices: a ring all-reduce of all gradients, not overlapped.

    Attributes:
        parameters: Elements of the network's parameters.
        bandwidth: Bytes per second between neighbours of the ring.
        latency: Seconds of a message.
    """

    parameters: int
    bandwidth: float
    latency: float = 1e-5

    def seconds(self, devices: int) -> float:
        """Return the seconds of an exchange (Patarasuk and Yuan 2009).

        It has 2 (n - 1) messages, each with 1 / n of the gradients.
        """
        if devices == 1:
            return 0.0
        message = self.parameters * BYTES_PER_ELEMENT / devices / self.bandwidth + self.latency
        return 2 * (devices - 1) * message

    def __str__(self) -> str:
        megabytes = self.parameters * BYTES_PER_ELEMENT / 1e6
        return (
            f"a ring all-reduce of {three_digits(megabytes)} MB at "
            f"{three_digits(self.bandwidth / 1e9)} GB/s with a latency of "
            f"{three_digits(self.latency * 1e6)} us, not overlapped"
        )


class Timed(NamedTuple):
    """A timed optimizer step.

    Attributes:
        local_batch: Examples that a device takes at once.
        seconds: Seconds of the step.
        devices: The number of devices.
        nodes: The number of nodes.
        accumulation: Micro-batches per step.
    """

    local_batch: float
    seconds: float
    devices: int = 1
    nodes: int = 1
    accumulation: int = 1


class Seconds(NamedTuple):
    """The predicted seconds of a step with 95 % limits.

    Attributes:
        value, low, high: The seconds and their limits.
        source: "fitted", "extrapolated" (beyond the timed steps) or "predicted" (from a `Link`).
    """

    value: float
    low: float
    high: float
    source: str


class _LastMicrobatch(NamedTuple):
    """The last micro-batch of a step: seconds, source, and the standard error of log seconds."""

    seconds: float
    source: str
    error: float


@dataclass(frozen=True)
class Exchange:
    """The exchange of gradients as fitted; the keys are numbers of nodes, up to `MANY_NODES`.

    Attributes:
        constants: alpha [seconds] and g of each number of nodes that was timed.
        max_devices: The largest timed number of devices of each.
        overlap: q; 1 is no overlap of computing and exchange.
        slowdown: c, how many times as long a device computes during an exchange.
        misfit: Like `StepTime.misfit`, of steps on several devices.
        residuals: Mean log of seconds over the model, by timed devices and nodes. So timed devices
            have their measured level, as a timed local batch has.
    """

    constants: dict[int, tuple[float, float]]
    max_devices: dict[int, int]
    overlap: float
    slowdown: float
    misfit: float
    residuals: dict[tuple[int, int], float] = field(default_factory=dict)

    def timed_nodes(self, nodes: int) -> int | None:
        """Return the timed key for a number of nodes: its own, or the nearest of several nodes.

        None if the exchange was timed on several nodes and is asked for within one, or vice versa.
        """
        key = min(nodes, MANY_NODES)
        if key in self.constants:
            return key
        others = [other for other in self.constants if other > 1]
        if key == 1 or not others:
            return None
        return min(others, key=lambda other: abs(other - key))

    def last_microbatch(self, single: float, devices: int, nodes: int) -> _LastMicrobatch | None:
        """Return the micro-batch that ends with an exchange; None if that is unknown.

        Args:
            single: Seconds of the micro-batch without an exchange.
            devices: The number of devices.
            nodes: The number of their nodes.
        """
        key = self.timed_nodes(nodes)
        if key is None:
            return None
        alpha, growth = self.constants[key]
        exchange = alpha * (1 + growth * math.log2(devices / 2))
        seconds = float(_p_norm(self.slowdown * single, exchange, self.overlap))
        seconds *= math.exp(self.residuals.get((devices, nodes), 0.0))
        source = "fitted"
        error = TYPICAL_ERROR
        ratio = devices / self.max_devices[key]
        if ratio > 1:
            source = "extrapolated"
            error = math.hypot(error, ERROR_PER_DOUBLING_OF_DEVICES * math.log2(ratio))
        if key != min(nodes, MANY_NODES):
            source = "extrapolated"
            error = math.hypot(error, ERROR_OF_OTHER_NODES)
        error = max(error, TYPICAL_ERROR_TOGETHER)
        if not math.isnan(self.misfit):
            error = max(error, self.misfit)
        return _LastMicrobatch(seconds, source, error)


@dataclass(frozen=True)
class StepTime:
    """A model of the seconds of a step.

    Attributes:
        a, b, p: The constants of one device [seconds, seconds per example, -].
        misfit: Root mean square of the residuals of log t on one device, over the points less the
            constants; nan with as many points as constants.
        local: The smallest and largest local batch that was timed on one device.
        exchange: The exchange of gradients; None if no step on several devices was timed.
        link: The assumed connection where no exchange was timed.
        largest: The largest local batch that fits in memory; larger ones are accumulated.
        node: The number of devices of a node; None if all are in one.
        residuals: Local batches timed on one device, ascending, and log of their seconds over the
            law.
        can_accumulate: Whether an accumulated batch trains as the same batch at once.
        least_parts: The parts of a batch at least, as of trainer.accumulate_grad_batches.
    """

    a: float
    b: float
    p: float
    misfit: float
    local: tuple[float, float]
    exchange: Exchange | None = None
    link: Link | None = None
    largest: int | None = None
    node: int | None = None
    residuals: tuple[tuple[float, float], ...] = ()
    can_accumulate: bool = True
    least_parts: int = 1

    def parts(self, batch_size: float, devices: int = 1) -> int:
        """Return the number of parts in which each device accumulates a global batch.

        A whole number of examples is divided into equal parts.
        """
        parts = self.least_parts
        if self.largest is not None:
            parts = max(parts, math.ceil(batch_size / devices / self.largest))
        if float(batch_size).is_integer():
            while parts < batch_size and batch_size % parts:
                parts += 1
        return parts

    def of_device(self, local_batch):
        """Return the seconds of one device for a local batch (number or array), no exchange."""
        m = np.asarray(local_batch, float)
        law = _p_norm(self.a, self.b * m, self.p)
        if not self.residuals:
            return law
        sizes, residuals = np.transpose(self.residuals)
        return law * np.exp(np.interp(np.log(m), np.log(sizes), residuals))

    def at(self, batch_size: float, devices: int = 1, nodes: int | None = None) -> Seconds | None:
        """Return the seconds of a step of a global batch on some devices.

        A local batch above `largest` is accumulated in the fewest equal parts, `least_parts` or
        more. The devices exchange gradients after the last part only.

        Args:
            batch_size: In examples.
            devices: The number of devices.
            nodes: The number of their nodes; by default the fewest.

        Returns:
            None if the exchange is unknown, if there are more parts than examples, or if the batch
            would be accumulated and cannot be.
        """
        local = batch_size / devices
        parts = self.parts(batch_size, devices)
        if local < parts:
            return None
        if parts > 1 and not self.can_accumulate:
            return None
        single = float(self.of_device(local / parts))
        if nodes is None:
            nodes = 1 if self.node is None else math.ceil(devices / self.node)
        last = self._last_microbatch(single, devices, nodes)
        if last is None:
            return None
        seconds = parts * single + (last.seconds - single)
        doublings = self._doublings_beyond(local, parts)
        source = last.source
        if source == "fitted" and doublings > 0:
            source = "extrapolated"
        error = last.error
        if not math.isnan(self.misfit):
            error = max(error, self.misfit)
        error = math.hypot(error, ERROR_PER_DOUBLING * doublings)
        factor = math.exp(NORMAL_95 * error)
        # Beyond the largest timed batch a device may be fully used. Then the time of a step is
        # proportional to the batch.
        when_full = 0.0
        if local / parts > self.local[1]:
            when_full = float(self.of_device(self.local[1])) * local / self.local[1]
        most = max(seconds, seconds - parts * single + when_full)
        return Seconds(seconds, seconds / factor, most * factor, source)

    def _last_microbatch(self, single: float, devices: int, nodes: int) -> _LastMicrobatch | None:
        """Return the last micro-batch of a step with its exchange; None if that is unknown."""
        if devices == 1:
            return _LastMicrobatch(single, "fitted", TYPICAL_ERROR)
        if self.exchange is not None:
            last = self.exchange.last_microbatch(single, devices, nodes)
            if last is not None:
                return last
        if self.link is None:
            return None
        exchange = self.link.seconds(devices)
        seconds = single + exchange
        # The exchange is assumed to be right within a factor of 2.
        error = math.hypot(TYPICAL_ERROR, math.log(2) * exchange / seconds / 2)
        return _LastMicrobatch(seconds, "predicted", error)

    def _doublings_beyond(self, local: float, parts: int) -> float:
        """Return the number of doublings between a micro-batch and the timed local batches."""
        smallest, largest = self.local
        above = math.log2(local / parts / largest)
        below = math.log2(smallest * parts / local)
        return max(0.0, above, below)

    def describe(self) -> str:
        """Return the model as one sentence."""
        kind = "a line"
        if self.p != 1:
            kind = f"flat up to about {number_text(self.a / self.b)} examples, then a line"
        misfit = ""
        if not math.isnan(self.misfit):
            misfit = f", misfit {self.misfit:.1%}"
        smallest, largest = self.local
        of_example = f" plus {format_duration(self.b, 2)} for each example"
        if self.b * largest < MIN_SHARE_OF_EXAMPLES * self.a:
            of_example, kind = "", "at any batch size"
        return (
            f"A step takes {format_duration(self.a, 2)}{of_example} ({kind}{misfit}; timed at "
            f"{smallest:g} to {largest:g} examples per device)."
        )


def fit_step_time(
    timed: Sequence[Timed],
    link: Link | None = None,
    largest: int | None = None,
    node: int | None = None,
) -> StepTime:
    """Return the model of some timed steps, by least squares of log t.

    Args:
        timed: Steps at two or more local batch sizes on one device; optionally on several devices.
        link, largest, node: Like in `StepTime`.

    Raises:
        ValueError: with fewer local batch sizes, or numbers that are not positive and finite.
    """
    on_one = []
    on_several = []
    for row in timed:
        step = Timed(*row)
        if not all(math.isfinite(x) and x > 0 for x in step):
            raise ValueError(f"{step}: the numbers of a timed step must be positive and finite")
        if step.devices == 1:
            on_one.append(step)
        else:
            on_several.append(step)
    m = _column(on_one, "local_batch")
    if len(np.unique(m)) < 2:
        raise ValueError("a model of the step time needs 2 local batch sizes timed on one device")
    t = _column(on_one, "seconds") / _column(on_one, "accumulation")
    law = _fit_device(m, t)
    log_residuals = np.log(t / law.of_device(m))
    residuals = []
    for size in np.unique(m):
        residuals.append((float(size), float(log_residuals[m == size].mean())))
    model = replace(law, link=link, largest=largest, node=node, residuals=tuple(residuals))
    if not on_several:
        return model
    return replace(model, exchange=_fit_exchange(model, on_several))


def _column(rows: Sequence[Timed], name: str) -> np.ndarray:
    return np.array([getattr(row, name) for row in rows], float)


def _p_norm(x, y, p):
    """Return (x^p + y^p)^(1/p) without overflow."""
    most = np.maximum(x, y)
    least = np.minimum(x, y)
    return most * (1 + (least / most) ** p) ** (1 / p)


def _fit_device(m: np.ndarray, t: np.ndarray) -> StepTime:
    """Return the fit of the seconds `t` at the local batches `m`: a line, or a knee if better."""
    start = np.log([t.min() / 2, np.median(t / m) / 2])

    def residuals(x: np.ndarray) -> np.ndarray:
        p = x[2] if len(x) > 2 else 1.0
        return np.log(_p_norm(math.exp(x[0]), math.exp(x[1]) * m, p) / t)

    best = least_squares(residuals, start)
    if np.unique(m).size >= MIN_SIZES_FOR_KNEE and _misfit(best.fun, best.x) > EXACT_MISFIT:
        limits = ([-np.inf, -np.inf, 1], [np.inf, np.inf, MAX_EXPONENT])
        knees = [least_squares(residuals, [*start, p], bounds=limits) for p in (1.5, 4)]
        knee = min(knees, key=lambda fit: fit.cost)
        if _misfit(knee.fun, knee.x) < KNEE_GAIN * _misfit(best.fun, best.x):
            best = knee
    p = 1.0
    if len(best.x) > 2:
        p = float(best.x[2])
    a, b = float(np.exp(best.x[0])), float(np.exp(best.x[1]))
    return StepTime(a, b, p, _misfit(best.fun, best.x), local=(m.min(), m.max()))


def _misfit(residuals: np.ndarray, constants: np.ndarray) -> float:
    """Return the root mean square of a fit's residuals, corrected for its constants."""
    degrees_of_freedom = len(residuals) - len(constants)
    if degrees_of_freedom <= 0:
        return math.nan
    return math.sqrt(float((residuals**2).sum()) / degrees_of_freedom)


def _fit_exchange(model: StepTime, rows: Sequence[Timed]) -> Exchange:
    """Return the exchange that fits steps on several devices: c, q, and alpha and g by nodes."""
    devices_by_nodes: dict[int, set[int]] = {}
    for row in rows:
        devices_by_nodes.setdefault(min(row.nodes, MANY_NODES), set()).add(row.devices)
    keys = sorted(devices_by_nodes)
    key_of_row = np.array([keys.index(min(row.nodes, MANY_NODES)) for row in rows])
    log_devices = np.log2(_column(rows, "devices") / 2)
    seconds = _column(rows, "seconds")
    parts = _column(rows, "accumulation")
    single = model.of_device(_column(rows, "local_batch"))
    scale = float(np.median(single))
    n = len(keys)

    # The variables are log c, log q, then log alpha (in units of `scale`) and log g by nodes.
    def residuals(x: np.ndarray) -> np.ndarray:
        alpha = scale * np.exp(x[2 : 2 + n])[key_of_row]
        growth = np.exp(x[2 + n :])[key_of_row]
        exchange = alpha * (1 + growth * log_devices)
        last = _p_norm(math.exp(x[0]) * single, exchange, math.exp(x[1]))
        return np.log(((parts - 1) * single + last) / seconds)

    connections = len({(row.devices, row.nodes) for row in rows})
    error_ratio = CONNECTION_ERROR / POINT_ERROR * math.sqrt(len(rows) / connections)

    def residuals_and_priors(x: np.ndarray) -> np.ndarray:
        slowdown = (x[0] - LOG_SLOWDOWN[0]) / LOG_SLOWDOWN[1]
        overlap = (x[1] - LOG_OVERLAP[0]) / LOG_OVERLAP[1]
        growth = error_ratio * (x[2 + n :] - LOG_GROWTH[0]) / LOG_GROWTH[1]
        return np.concatenate([residuals(x) / POINT_ERROR, [slowdown, overlap], growth])

    lower = [0, 0, *n * [-14], *n * [-7]]
    upper = [math.log(2), math.log(MAX_EXPONENT), *n * [7], *n * [3]]
    fits = []
    for overlap in (1.2, 4.0):
        start = [LOG_SLOWDOWN[0], math.log(overlap), *n * [-1.0], *n * [LOG_GROWTH[0]]]
        fits.append(least_squares(residuals_and_priors, start, bounds=(lower, upper)))
    best = min(fits, key=lambda fit: fit.cost).x
    constants = {}
    for i, key in enumerate(keys):
        alpha = scale * math.exp(best[2 + i])
        constants[key] = (alpha, math.exp(best[2 + n + i]))
    of_connection: dict[tuple[int, int], list[float]] = {}
    for row, residual in zip(rows, residuals(best), strict=True):
        of_connection.setdefault((row.devices, row.nodes), []).append(-float(residual))
    return Exchange(
        constants=constants,
        max_devices={key: max(devices_by_nodes[key]) for key in keys},
        overlap=math.exp(best[1]),
        slowdown=math.exp(best[0]),
        misfit=_misfit(residuals(best), best),
        residuals={key: float(np.mean(each)) for key, each in of_connection.items()},
    )
