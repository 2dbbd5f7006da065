"""What a store that is too small serves: chunks in parts beside whole chunks."""
