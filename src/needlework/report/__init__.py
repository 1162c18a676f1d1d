"""Reports: tables, figures and one self-contained page from the trials of one or more runs. Free of torch."""

from needlework.report.page import build
from needlework.report.tables import summary

__all__ = ["build", "summary"]
