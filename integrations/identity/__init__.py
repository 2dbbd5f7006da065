"""Names of all that determines a KV cache: weights, adapters, the engine's configuration, its environment."""
