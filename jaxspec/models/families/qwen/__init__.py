"""Qwen 2 to 3.5, dense, with experts, hybrid and with vision."""
