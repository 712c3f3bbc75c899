"""What kernels of several kinds of attention share."""
