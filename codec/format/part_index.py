"""Index of a coded part. It finds each tile without reading the others, so that all tiles take linear time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.format.coded_part import CodedPart
from cuvee.codec.format.streams import WINDOW, Escapes, Streams, stream_count
from cuvee.codec.support.lazy import lazy


class IndexedPart:
    """The coded part of a section, with the places of any tokens' streams and escapes.

    Args:
        part: the result of `coded_part.read_coded`.
        tokens: T, the columns of the matrix in which escapes are numbered.

    Attributes:
        part: as given.
    """

    def __init__(self, part: CodedPart, tokens: int) -> None:
        self.part = part
        self._tokens = tokens

    @lazy
    def _words_at(self) -> npt.NDArray[np.int64]:
        """The first word of each stream, and the end of the last stream's words."""
        return np.concatenate([[0], np.cumsum(self.part.streams.lengths, dtype=np.int64)])

    @lazy
    def _windows(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Numbers of the escapes, sorted by window (the part lists them by row), and where each window begins."""
        windows = self.part.escapes.index % np.uint32(self._tokens) // np.uint32(WINDOW)
        order = np.argsort(windows, kind="stable")
        return order, np.searchsorted(windows[order], np.arange(-(-self._tokens // WINDOW) + 1))

    def select(self, at: slice) -> tuple[Streams, Escapes]:
        """Return the streams and the escapes of the tokens `at`, with escapes numbered within these tokens.

        The tokens must begin and end where streams do.
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
