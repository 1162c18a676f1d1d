"""Loaded models and what the product knows about their families."""
