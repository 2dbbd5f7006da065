"""The stages compiled by Numba, and the loops that they share. They release the GIL."""
