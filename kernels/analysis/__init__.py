"""Costs of the kernels without a GPU: compiled code is measured, counted work is bounded; see `cuvee kernels`."""
