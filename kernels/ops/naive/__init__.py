"""What the kernels must compute, in PyTorch and NumPy: `f_reference` for every launcher `f` in the module above."""
