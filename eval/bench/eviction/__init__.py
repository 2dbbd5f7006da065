"""`cuvee bench eviction`."""
