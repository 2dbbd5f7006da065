"""Learning profiles: what calibration needs of a model, and all that is estimated from it."""
