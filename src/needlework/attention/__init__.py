"""The one attention function: what it computes (function), what is done in it (plan), what it reads (keys)."""
