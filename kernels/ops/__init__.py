"""The kernels, each beside its launcher; `tests/kernels/naive/` holds a reference for every launcher."""
