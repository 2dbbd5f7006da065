"""The names under which chunks of KV are stored and found again; coding knows nothing of them."""
