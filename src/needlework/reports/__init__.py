"""Reports: tables, figures and a self-contained HTML page from the trials of one or more runs. Does not import torch."""

from needlework.reports.page import report
from needlework.reports.tables import summary

__all__ = ["report", "summary"]
