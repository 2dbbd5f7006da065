"""What compressed offload costs and saves in vLLM."""
