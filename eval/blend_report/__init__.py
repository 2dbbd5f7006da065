"""What blending recovers, by selector and cost."""
