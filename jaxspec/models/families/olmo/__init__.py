"""OLMo 2 and 3."""
