"""The cost and benefit of compressed offload in vLLM."""
