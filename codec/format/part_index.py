"""Tiles of a coded part, each found without looking at the others, so that all of them take linear time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import Escapes
from cuvee.codec.entropy.streams import Streams, stream_count
from cuvee.codec.entropy.token_classes import WINDOW
from cuvee.codec.format.container import CodedPart
from cuvee.codec.support.lazy import lazy


class IndexedPart:
    """The coded part of a section, and where in it the streams and the escapes of any tokens are.

    Args:
        part: what `container.read_coded` found.
        tokens: T, the columns of the matrix in which the escapes are numbered.

    Attributes:
        part: as given.
    """

    def __init__(self, part: CodedPart, tokens: int) -> None:
        self.part = part
        self._tokens = tokens

    @lazy
    def _words_at(self) -> npt.NDArray[np.int64]:
        """Where the words of each stream begin, and where those of the last one end."""
        return np.concatenate([[0], np.cumsum(self.part.streams.lengths, dtype=np.int64)])

    @lazy
    def _windows(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """The numbers of the escapes window by window, which are listed row by row; and where each window begins."""
        windows = self.part.escapes.index % np.uint32(self._tokens) // np.uint32(WINDOW)
        order = np.argsort(windows, kind="stable")
        return order, np.searchsorted(windows[order], np.arange(-(-self._tokens // WINDOW) + 1))

    def select(self, at: slice) -> tuple[Streams, Escapes]:
        """The streams and the escapes of the tokens `at`, the escapes numbered within them.

        The tokens begin where a stream does, and end where one does or the last one ends.
        """
        n, streams, escapes = self.part.tokens_per_stream, self.part.streams, self.part.escapes
        if at.start == 0 and at.stop == self._tokens:
            return streams, escapes
        own = slice(at.start // n, stream_count(at.stop, n))
        words = streams.words[self._words_at[own.start] : self._words_at[own.stop]]
        order, begins = self._windows
        listed = np.sort(order[begins[at.start // WINDOW] : begins[-(-at.stop // WINDOW)]])
        row, column = np.divmod(escapes.index[listed], np.uint32(self._tokens))
        inside = (column >= at.start) & (column < at.stop)
        index = row[inside] * np.uint32(at.stop - at.start) + (column[inside] - np.uint32(at.start))
        return Streams(streams.states[own], streams.lengths[own], words), Escapes(index, escapes.value[listed][inside])
