"""The connector's side in a rank of vLLM: it copies, encodes and stores pages, and loads, decodes and places them."""
