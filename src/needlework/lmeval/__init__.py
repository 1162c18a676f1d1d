"""General ability through lm-evaluation-harness. Its modules import lm-eval only where it is needed: that takes seconds."""
