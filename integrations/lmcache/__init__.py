"""LMCache: an L2 adapter that keeps chunks compressed. `l2_adapter.CuveeL2Adapter` is what LMCache loads."""
