"""What cuts across: benchmarks and, later, metrics, tracing and the server."""
