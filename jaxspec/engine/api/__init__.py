"""Clients of the engine: loading, prompts, answers, samples, scores."""
