"""Replication: the claims of Lee et al. 2021, judged on stored studies, and the pages of them.

Read in this order: `claims.yaml` (what the paper claims and when a study agrees), `claims` (which
studies a claim is judged on, and what can be measured: one function each in `scaling`, `terms` and
`search`), `rules` (how a number becomes a verdict), `parts`, `page` and `appendix` (what is
written). A claim on an existing quantity is an entry of `claims.yaml`.

This room imports public names of `lit_dps` and `lit_dps.analysis`, as a user's script does, and the
paper's protocol (`lit_dps.core.paper_protocol`); a test of the layers checks this.
"""
