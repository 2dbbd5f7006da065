"""How several processes learn one profile together: they split the sequences, and exchange what they measure.

Second moments are sums, so they are added up. Samples and measurements are gathered. What may come out otherwise on
another device is decided by rank 0, and all take its profile. A process does its own work within `agreeing`: if that
fails, all of them raise, and none waits for what never comes. They are the processes of PyTorch's default group, as
`torchrun` starts them and `torch.distributed.init_process_group` joins them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import distributed

from cuvee.codec.errors import InputError, ProfileError

if TYPE_CHECKING:
    from cuvee.codec.learning.moments import Moments

T = TypeVar("T")


class Together(Protocol):
    """What calibration needs of the processes that take part in it."""

    @property
    def rank(self) -> int:
        """The rank of this process, 0 … size - 1."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def gather(self, own: T) -> list[T]:
        """What every process gave, by rank. Every process must call this."""
        ...

    def from_first(self, own: T) -> T:
        """What rank 0 gave."""
        ...

    def add_up(self, moments: list[Moments]) -> None:
        """Replace the sums and the sample of each process by those of all, in place."""
        ...


class Alone:
    """A process on its own."""

    rank, size = 0, 1

    def gather(self, own: T) -> list[T]:
        """The only one."""
        return [own]

    def from_first(self, own: T) -> T:
        """The only one."""
        return own

    def add_up(self, moments: list[Moments]) -> None:
        """Do nothing: there is nothing to add."""


class Processes:
    """All processes of PyTorch's default group.

    Raises:
        InputError: there is no such group.
    """

    def __init__(self) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InputError(
                "distributed=True needs a process group: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # NCCL only adds up what lies on GPUs.
        on_gpu = "nccl" in distributed.get_backend()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None

    def gather(self, own: T) -> list[T]:
        """What every process gave, by rank."""
        everything: list[Any] = [None] * self.size
        distributed.all_gather_object(everything, own)
        return everything

    def from_first(self, own: T) -> T:
        """What rank 0 gave."""
        held: list[Any] = [own if self.rank == 0 else None]
        distributed.broadcast_object_list(held, src=0)
        return held[0]  # type: ignore[no-any-return]

    def add_up(self, moments: list[Moments]) -> None:
        """Add up the sums of all processes. They first need a common origin, which is the mean of their origins."""
        with agreeing(self, "adding up"):
            counts = [section.total.new_tensor([section.count]) for section in moments]
            origins = [section.origin.double() * count for section, count in zip(moments, counts, strict=True)]
        for sums in (*counts, *origins):
            self._sum(sums)
        with agreeing(self, "adding up"):
            for section, count, origin in zip(moments, counts, origins, strict=True):
                section.move_origin((origin / count.clamp_min(1)).float())
                section.count = round(float(count))
        for section in moments:
            for sums in (section.total, section.sink_total, section.sink_count, *section.products, *section.metrics):
                self._sum(sums)
            section.sample = [run for runs in self.gather(section.sample) for run in runs]

    def _sum(self, own: torch.Tensor) -> None:
        if self._device is None or own.device == self._device:
            distributed.all_reduce(own)
            return
        there = own.to(self._device)
        distributed.all_reduce(there)
        own.copy_(there)


@contextmanager
def agreeing(together: Together, what: str) -> Iterator[None]:
    """Do this process' own work in this block, and learn at its end whether all others did theirs.

    Every process must come to it, in the same order. Nothing may be exchanged within the block, because a process that
    fails leaves it at once.

    Args:
        together: the processes.
        what: they do, for the message.

    Raises:
        ProfileError: another process failed; the message names its rank and says why. One that failed itself raises its
            own error.
    """
    try:
        yield
    except Exception as error:
        together.gather(f"{type(error).__name__}: {error}")
        if together.size > 1:
            error.add_note(f"in the process of rank {together.rank} of {together.size}, while {what}")
        raise
    for rank, failure in enumerate(together.gather("")):
        if failure:
            raise ProfileError(
                f"distributed: the process of rank {rank} failed while {what} ({failure:.500}), so none has a profile; "
                "mend that and start all processes anew"
            )


def same_everywhere(together: Together, arguments: Mapping[str, object]) -> None:
    """Check that all processes were called with the same arguments.

    Raises:
        InputError: one was not. It is raised in every process.
    """
    told = together.gather(arguments)
    for rank, theirs in enumerate(told):
        for name, first in told[0].items():
            if theirs[name] != first:
                raise InputError(
                    f"{name} is {theirs[name]!r} in the process of rank {rank}, {first!r} in that of rank 0"
                )
