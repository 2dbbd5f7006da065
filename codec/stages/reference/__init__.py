"""The stages in plain NumPy, written to be read: with `codec/FORMAT.md`, they specify the bitstream."""
