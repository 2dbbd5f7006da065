"""Profiles: what is learned offline for one model, its file, its quality curve, and how it codes at one step."""
