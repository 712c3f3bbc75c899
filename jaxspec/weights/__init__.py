"""Weights: parameters, their sources in a checkpoint, loading, and replacing them."""
