"""The kernels, each beside its launcher; `naive/` holds a reference with the same signature for every launcher."""
