"""The report page of a study: one HTML file with the answer, figures, tables and sliders."""

from lit_dps.report.html.page import page

__all__ = ["page"]
