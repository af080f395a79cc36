"""Replication: the paper's protocol and claims (Lee et al. 2021), and the pages that judge them.

Read in this order: `protocol`, `paper` (all claims), `rules` (how a claim is decided), the files
`claims_*` (the claims), `page` and `appendix` (what is written).
"""
