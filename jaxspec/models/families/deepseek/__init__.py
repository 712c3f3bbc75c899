"""DeepSeek-V3 and V4."""
