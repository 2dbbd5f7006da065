"""Adapters to transformers, vLLM, LMCache and stores: thin, no mathematics here."""
