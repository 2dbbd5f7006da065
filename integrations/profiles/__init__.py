"""Profiles of many models in one place: a folder, object storage, or a repository of the Hugging Face hub.

    cuvee profile push ──> ProfileCollection ──files by name──> a folder, a bucket or the hub
    cuvee profile pull <──        │
    engines            <── find_profile: what option "profile" names

`location` says how a place and an id are written, `collection` how a profile is verified.
"""
