"""The report page of a study: one HTML file with interactive charts, made by plotly."""

from lit_dps.analysis.page.html import page

__all__ = ["page"]
