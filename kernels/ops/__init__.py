"""The kernels, each beside its launcher; `tests/kernels` compares each with the stages of `tests/codec/reference`."""
