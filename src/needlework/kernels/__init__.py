"""Scans and convolutions of recurrent layers: compiled kernels on the CPU, torch or GPU libraries on other devices."""

from needlework.kernels.conv import causal_conv
from needlework.kernels.rglru import gated_rglru
from needlework.kernels.selective_scan import selective_scan

__all__ = ["causal_conv", "gated_rglru", "selective_scan"]
