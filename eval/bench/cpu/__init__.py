"""Speed and memory of the codec on a CPU."""
