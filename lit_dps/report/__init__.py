"""Report: what people read of a study, from an `Analysis`: text, notes, figures, one HTML page.

Read in this order: `text` (what `lit-dps analyze` prints), `warnings` (the notes),
`publish` (writes all files), `figures` (one file each), `html` (the page). Only `figures` imports
matplotlib.
"""
