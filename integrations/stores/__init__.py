"""Stores of blobs: RAM, disk, Redis, object storage, and tiers of them, each behind a URL."""

from cuvee.integrations.stores.base import Store, StoreError, TierCounters
from cuvee.integrations.stores.urls import open_store

__all__ = ["Store", "StoreError", "TierCounters", "open_store"]
