"""Benchmarks that others wrote, run against vLLM's server with and without cuvee."""
