"""Profiles: the data learned offline for one model, their file, the quality curve, and coding plans per step."""
