"""`cuvee blend-report`: what blending recovers, by selector and cost."""
