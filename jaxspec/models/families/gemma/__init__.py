"""Gemma 3 and 4."""
