"""Measure what compression costs: the bundled model and texts, the re-read protocol, baselines, reports."""
