"""Looking at and improving what the core does: inspection, plots, checks, training."""
