"""Texts and models: the bundled ones, the real model that is downloaded once, and the user's."""
