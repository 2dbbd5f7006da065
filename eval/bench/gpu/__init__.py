"""Speed of the codec on a GPU."""
