"""What `Codec` does between chunks and blobs: verify, encode, decode."""
