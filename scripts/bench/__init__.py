"""What the benchmark scripts share: shapes, a running state, traffic and timing."""
