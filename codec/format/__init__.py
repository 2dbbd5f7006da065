"""The blob as bytes: container, checksums, secret keys. `codec/FORMAT.md` is the specification."""
