"""What a store calls to survive a fork: see `cuvee.codec.support.forks`, which the layers below use, too."""

from cuvee.codec.support.forks import Forked, tell_after_fork

__all__ = ["Forked", "tell_after_fork"]
