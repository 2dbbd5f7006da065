"""The stages of the codec on the CPU, implemented twice: `reference` is plain NumPy, `compiled` is Numba.

A file in `compiled` has the stages of the file of the same name in `reference`, and gives the same bytes.
"""
