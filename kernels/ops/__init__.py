"""The kernels, each beside its launcher; `tests/kernels` compares each with the codec's reference stages."""
