"""`cuvee bench refinements`."""
