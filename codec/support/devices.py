"""Devices by name."""

from __future__ import annotations

import torch

from cuvee.codec.errors import InputError

__all__ = ["usable_device"]


def usable_device(device: torch.device | str | int, name: str = "device") -> torch.device:
    """Return a device on which this process can make tensors.

    Raises:
        InputError: torch does not know the device, or it is not there; the message begins with `name`.
    """
    try:
        usable = torch.device(device)
        if usable.type != "cpu":
            torch.empty(0, dtype=torch.uint8, device=usable)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"{name}: must be a device that torch can use here, got {str(device)!r}: cpu always is; "
            "cuda or cuda:N needs a GPU and a build of torch for it"
        ) from error
    return usable
