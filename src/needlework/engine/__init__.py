"""Prefill once, fork the memory, decode every trial in one batch."""
