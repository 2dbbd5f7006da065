"""Pages of engines that move their KV cache in pages of their own naming, in and out of a store.

    engine's memory --PagedCache--> PageStore --pages--> codec --blobs--> store

An adapter describes the engine's memory as a `cuvee.codec.paged.PagedCache` and hands over the engine's names of pages.
`PageStore` does the rest. Memory in an order that nobody describes is an `OpaquePage`: bytes, coded without loss.
"""

from cuvee.integrations.pages.counts import COUNTED, Counts
from cuvee.integrations.pages.opaque import OpaquePage
from cuvee.integrations.pages.opening import PageStores
from cuvee.integrations.pages.page_store import PageStore

__all__ = ["COUNTED", "Counts", "OpaquePage", "PageStore", "PageStores"]
