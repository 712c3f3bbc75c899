"""Quantized matrices in checkpoints: blocks and codes, whoever wrote them."""
