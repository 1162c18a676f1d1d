"""Loaded models: hooks, caches, edits, loading and checking of files, and facts about model families."""
