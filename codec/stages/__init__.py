"""The stages of the codec on the CPU: those of `compiled` in Numba, and what they share or leave to PyTorch."""
