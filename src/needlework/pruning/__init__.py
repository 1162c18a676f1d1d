"""Prune attention heads: remove them from the weights, or limit their cache to sinks and a window (streaming)."""
