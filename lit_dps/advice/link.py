"""What is assumed of a connection between devices where no exchange was timed."""

from __future__ import annotations

from dataclasses import dataclass

from lit_dps.analysis.tables import three_digits

BYTES = 4  # of a gradient element


@dataclass(frozen=True)
class Link:
    """What is assumed of a connection that was not timed: a ring all-reduce of all gradients,
    nothing overlapped.

    Attributes:
        parameters: Of the network.
        bandwidth: Bytes a second between neighbours of the ring.
        latency: Seconds of a message.
    """

    parameters: int
    bandwidth: float
    latency: float = 1e-5

    def seconds(self, devices: int) -> float:
        """2 (n - 1) messages, each of 1 / n of the gradients (Patarasuk and Yuan 2009)."""
        if devices == 1:
            return 0.0
        message = self.parameters * BYTES / devices / self.bandwidth + self.latency
        return 2 * (devices - 1) * message

    def __str__(self) -> str:
        size = self.parameters * BYTES / 1e6
        return (
            f"a ring all-reduce of {three_digits(size)} MB at "
            f"{three_digits(self.bandwidth / 1e9)} GB/s and "
            f"{three_digits(self.latency * 1e6)} us, nothing overlapped"
        )
