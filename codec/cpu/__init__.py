"""The backend for CPUs: threads around the schemes."""
