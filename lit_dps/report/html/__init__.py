"""The report page of a study: one HTML file with interactive charts, made by plotly."""

from lit_dps.report.html.page import page

__all__ = ["page"]
