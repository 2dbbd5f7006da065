"""The stages of the codec on the CPU, implemented twice: `reference` is plain NumPy, `compiled` is Numba.

A file in `compiled` implements the stages of the `reference` file of the same name, and gives the same bytes.
"""
