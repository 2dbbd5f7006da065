"""Collective operations for learning one profile in several processes.

The processes split the sequences and exchange what they measure: second moments are added up, samples and measurements
are gathered. Rank 0 makes every decision that could differ on another device, and all processes take its profile. Each
process does its own work inside `raise_on_all_ranks`: if one process fails there, all of them raise, so none waits for
a message that never comes. The processes are those of PyTorch's default group, started by `torchrun` and joined by
`torch.distributed.init_process_group`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import distributed

from cuvee.codec.errors import InputError, ProfileError

if TYPE_CHECKING:
    from cuvee.codec.learning.moments import Moments

T = TypeVar("T")


class ProcessGroup(Protocol):
    """The processes that calibrate one profile. Every process must call each method, in the same order."""

    @property
    def rank(self) -> int:
        """The rank of this process, 0 … size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        ...

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        ...

    def all_reduce(self, moments: list[Moments]) -> None:
        """Replace the sums and samples of each process by those of all processes, in place."""
        ...

    def add_up(self, sums: Iterable[torch.Tensor]) -> None:
        """Replace the tensors of each process by their sums over all processes, in place."""
        ...


class SingleProcess:
    """A group of one process."""

    rank, size = 0, 1

    def all_gather(self, value: T) -> list[T]:
        """Return a list of the one value."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value

    def all_reduce(self, moments: list[Moments]) -> None:
        """Do nothing: the sums are complete."""

    def add_up(self, sums: Iterable[torch.Tensor]) -> None:
        """Do nothing: the sums are complete."""


class TorchProcessGroup:
    """PyTorch's default process group.

    Raises:
        InputError: the group is not initialized.
    """

    def __init__(self) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InputError(
                "distributed: must be called within a process group: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # NCCL only reduces tensors on GPUs.
        on_gpu = "nccl" in distributed.get_backend()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        values: list[Any] = [value if self.rank == 0 else None]
        distributed.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[no-any-return]

    def all_reduce(self, moments: list[Moments]) -> None:
        """Add up the sums of all processes, after moving them to a common origin: the mean of their origins."""
        with raise_on_all_ranks(self, "adding up"):
            counts = [section.total.new_tensor([section.count]) for section in moments]
            origins = [section.origin.double() * count for section, count in zip(moments, counts, strict=True)]
        self.add_up((*counts, *origins))
        with raise_on_all_ranks(self, "adding up"):
            for section, count, origin in zip(moments, counts, origins, strict=True):
                section.move_origin((origin / count.clamp_min(1)).float())
                section.count = round(float(count))
        for section in moments:
            self.add_up((section.total, section.sink_total, section.sink_count, *section.products, *section.metrics))
            section.sample = [run for runs in self.all_gather(section.sample) for run in runs]

    def add_up(self, sums: Iterable[torch.Tensor]) -> None:
        """See `ProcessGroup.add_up`."""
        for tensor in sums:
            if self._device is None or tensor.device == self._device:
                distributed.all_reduce(tensor)
                continue
            on_gpu = tensor.to(self._device)
            distributed.all_reduce(on_gpu)
            tensor.copy_(on_gpu)


@contextmanager
def raise_on_all_ranks(processes: ProcessGroup, task: str) -> Iterator[None]:
    """Run this process's own work in the block; at its end, raise in every process if the work failed in any.

    All processes must enter the block, in the same order. The block must not communicate, because a process that fails
    leaves it at once.

    Args:
        processes: the group.
        task: the name of the work, for the message.

    Raises:
        ProfileError: another process failed; the message names its rank and its error. A process that failed itself
            raises its own error.
    """
    try:
        yield
    except Exception as error:
        processes.all_gather(f"{type(error).__name__}: {error}")
        if processes.size > 1:
            error.add_note(f"in the process of rank {processes.rank} of {processes.size}, while {task}")
        raise
    for rank, failure in enumerate(processes.all_gather("")):
        if failure:
            raise ProfileError(
                f"distributed: the process of rank {rank} failed while {task} ({failure:.500}), so no process has a "
                "profile; fix the cause and restart all processes"
            )


def check_same_arguments(processes: ProcessGroup, arguments: Mapping[str, object]) -> None:
    """Check that all processes were called with the same arguments.

    Raises:
        InputError: an argument differs. Every process raises it.
    """
    by_rank = processes.all_gather(arguments)
    for rank, others in enumerate(by_rank):
        for name, first in by_rank[0].items():
            if others[name] != first:
                raise InputError(
                    f"{name}: must be the same in all processes, got {others[name]!r} in rank {rank} and {first!r} in "
                    "rank 0"
                )
