"""Entropy coding: probability tables, the family they come from, token classes, and the coded part of a section."""
