"""Retrieval heads: methods that rank heads, evaluation of rankings, and the smallest set of heads that keeps retrieval."""
