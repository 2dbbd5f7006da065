"""vLLM's pages: how their layers, states and drafts lie in memory, found by a probe, and how they are coded."""
