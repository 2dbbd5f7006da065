"""Speed and size of an engine's pages in a store, without an engine."""
