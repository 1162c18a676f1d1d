"""Fast scans for recurrent layers, behind the signatures of `needlework.kernels.reference`."""

from needlework.kernels.rglru import rglru_scan
from needlework.kernels.selective_scan import selective_scan

__all__ = ["rglru_scan", "selective_scan"]
