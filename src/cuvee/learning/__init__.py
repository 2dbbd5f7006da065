"""Learn profiles: gradients, moments, sections and curves, from a model or from samples of its cache."""
