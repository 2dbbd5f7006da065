"""The connector's side in vLLM's scheduler: what the store has of a request, and what ranks load and store."""
