"""The stages compiled by Numba, and the loops that they share. None of them holds the GIL."""
