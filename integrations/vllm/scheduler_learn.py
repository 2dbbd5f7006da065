"""Learning on the scheduler's side: the sums of all ranks --> a profile --> its collection.

One thread of the lowest priority does that, once in the engine's life. If the collection cannot be reached or refuses
the profile, it is tried again, less and less often, until the engine stops.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from cuvee.codec.errors import CuveeError
from cuvee.codec.learning.running_moments import RunningMoments
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.guard import Guard
from cuvee.integrations.profile_collection.collection import ProfileCollection
from cuvee.integrations.profile_collection.location import shown_profile
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.cores import LOWEST_PRIORITY, give_way
from cuvee.integrations.vllm.learning import Learning
from cuvee.integrations.vllm.messages import SumsPiece
from cuvee.integrations.vllm.metrics import Recorder

logger = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 60.0, 3600.0  # seconds between attempts to publish; doubled each time


class ProfileLearner:
    """Makes a profile of the sums that ranks report, and publishes it.

    Args:
        learning: what is learned.
        recorder: figures.
        guard: contains errors.
    """

    def __init__(self, learning: Learning, recorder: Recorder, guard: Guard) -> None:
        self._learning, self._recorder, self._guard = learning, recorder, guard
        self._pool = ThreadPool(1, "cuvee-learn", math.inf, begin=lambda: give_way(LOWEST_PRIORITY))
        self._pieces: dict[int, dict[int, SumsPiece]] = {rank: {} for rank in range(learning.shards)}
        self._closing = threading.Event()
        self._unpublished = False

    def take(self, pieces: Iterable[SumsPiece]) -> None:
        """Learn of further pieces of sums; the last one starts the work."""
        for piece in pieces:
            self._pieces[piece.rank][piece.number] = piece
            if all(own and len(own) == next(iter(own.values())).count for own in self._pieces.values()):
                ranks = [b"".join(own[at].data for at in range(len(own))) for own in self._pieces.values()]
                self._pieces = {rank: {} for rank in self._pieces}
                self._pool.submit(self._work, ranks)

    def close(self) -> None:
        """Give up what is not published yet, and say so."""
        self._closing.set()
        self._pool.dismiss(0, cancel=True)
        if self._unpublished:
            logger.warning(
                "cuvee: the learned profile is lost, because %s never took it", shown_profile(self._learning.place)
            )

    def _work(self, ranks: list[bytes]) -> None:
        with self._guard("learn", lambda: self._recorder.count("learned_profiles", label="failed")):
            begun = time.thread_time()
            profile = self._fit(ranks)
            self._recorder.count("learning_seconds", time.thread_time() - begun)
            self._unpublished = True
            self._publish(profile)

    def _fit(self, ranks: list[bytes]) -> Profile:
        learning = self._learning
        shards = [
            RunningMoments.from_bytes(data, learning.layout.shard(rank, learning.shards))
            for rank, data in enumerate(ranks)
        ]
        sums = shards[0] if len(shards) == 1 else RunningMoments.join(learning.layout, shards)
        return sums.profile(learning.embedding, learning.weights)

    def _publish(self, profile: Profile) -> None:
        """Push the profile unless the collection has one by now; try again if that fails."""
        shown, delay = shown_profile(self._learning.place), FIRST_RETRY
        while not self._closing.is_set():
            try:
                pushed = self._push(profile)
            except (CuveeError, OSError) as error:
                self._recorder.count("learned_profiles", label="failed")
                logger.warning("cuvee: the learned profile was not published, next attempt in %g s: %s", delay, error)
                self._closing.wait(delay)
                delay = min(2 * delay, LAST_RETRY)
                continue
            self._unpublished = False
            self._recorder.count("learned_profiles", label="published" if pushed else "found")
            logger.info(
                "cuvee: %s %s. It is used from the next start on",
                f"published the learned profile {profile.id.hex()} in" if pushed else "another engine was first to "
                "publish a profile of this model in", shown,
            )  # fmt: skip
            return

    def _push(self, profile: Profile) -> bool:
        with tempfile.TemporaryDirectory(prefix="cuvee-") as folder:
            path = Path(folder) / "profile.safetensors"
            profile.save(path)
            with closing(ProfileCollection.open(self._learning.place)) as collection:
                return collection.push_first(path) is not None
