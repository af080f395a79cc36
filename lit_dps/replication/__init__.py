"""The paper's protocol and claims, and the pages that judge them."""

from lit_dps.replication.appendix import Core, Image, Machine, Part, appendix_page, progress, table
from lit_dps.replication.claims_critical import critical_later, critical_no_earlier, critical_of_momentum
from lit_dps.replication.claims_scaling import (
    diminishing_returns,
    exponent,
    linear_scaling,
    more_steps_of_sparse,
    plateau,
    steps_of_sparse,
)
from lit_dps.replication.claims_terms import lipschitz_rises, loss_stays, theory_tells, variance_falls
from lit_dps.replication.claims_trials import correlation_interval, rank_correlation, rate_grows, region_grows
from lit_dps.replication.compared import searched
from lit_dps.replication.page import headlines, larger_undecided, replication_page, scale, span
from lit_dps.replication.paper import (
    CLAIMS,
    Claim,
    Judgement,
    compared_with,
    judge,
    overall,
    protocol_rows,
    search_text,
)
from lit_dps.replication.protocol import workload
from lit_dps.replication.rules import (
    Estimate,
    Finding,
    Verdict,
    at_each,
    combined,
    curves,
    decide,
    estimated,
    fit_ratio,
    k_star_draws,
    log_ratio,
)
from lit_dps.replication.under_way import as_measured
