"""Size, quality and task scores of cuvee beside every baseline, in one report."""
