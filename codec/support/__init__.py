"""Utilities for all parts of the codec: files, forks, JSON, lazy attributes, suggestions."""
