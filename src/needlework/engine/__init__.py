"""The inference engine: each distinct prompt is prefilled once, its cache is forked, and all requests decode in one batch."""
