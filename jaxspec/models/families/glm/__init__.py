"""GLM-4 and GLM-4.7-Flash."""
