"""A command of lit-dps that stops itself: `python stopped_study.py N study ...`.

It sends itself SIGSTOP when it has claimed its Nth trial. It then holds nothing that other
processes wait for: no transaction, and no lock but the one that says that it lives.
"""

from __future__ import annotations

import os
import signal
import sys

from lit_dps.cli import main
from lit_dps.storage.trial_queue import TrialQueue


def stop_at_claim(n: int) -> None:
    """Make the nth `TrialQueue.claim_next` of this process stop the process."""
    claim_next, claims = TrialQueue.claim_next, 0

    def claim_and_stop(queue: TrialQueue):
        nonlocal claims
        attempt = claim_next(queue)
        claims += 1
        if claims == n:
            os.kill(os.getpid(), signal.SIGSTOP)
        return attempt

    TrialQueue.claim_next = claim_and_stop


if __name__ == "__main__":
    stop_at_claim(int(sys.argv[1]))
    sys.argv = ["lit-dps", *sys.argv[2:]]
    sys.exit(main(sys.argv[1:]))
