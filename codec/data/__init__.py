"""Texts and models: those that come with cuvee, the real model that is fetched once, and the user's own."""
