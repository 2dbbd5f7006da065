"""Speed: of the codec on a CPU and on a GPU, and of a serving engine with it."""
