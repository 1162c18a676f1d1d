"""Fast scans for recurrent layers, behind the signatures of `needlework.kernels.reference`."""

from needlework.kernels.conv import causal_conv
from needlework.kernels.gated_rglru import gated_rglru
from needlework.kernels.rglru import rglru_scan
from needlework.kernels.selective_scan import selective_scan

__all__ = ["causal_conv", "gated_rglru", "rglru_scan", "selective_scan"]
