"""Loads with a deadline in vLLM, from real stores behind a link whose rate is known."""
