"""The paper's claims, judged by their ids."""

from __future__ import annotations

from lit_dps.analysis import Analysis
from lit_dps.replication.claims import paper_claims
from lit_dps.replication.rules import Finding

CLAIMS = {claim.id: claim for claim in paper_claims()}


def judged(claim_id: str, *studies: Analysis) -> Finding | None:
    """Return the finding of a claim on a study, or a pair; None if it does not apply."""
    return CLAIMS[claim_id].judge(*studies)
