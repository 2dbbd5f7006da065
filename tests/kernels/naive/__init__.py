"""What the kernels must compute: `f_reference` for every launcher `f` in `kernels/ops`, by the codec's own stages."""
