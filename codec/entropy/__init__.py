"""Entropy coding: probability tables and their family, coding plans, token classes, streams, and coded sections."""
