"""Download the real model and print its folder: `python -m cuvee.calibration`."""

from __future__ import annotations

import sys

from cuvee.calibration.real_model import smollm2_path
from cuvee.codec.errors import CuveeError


def main() -> int:
    """Return the exit code: a failure is one line on standard error and 1."""
    try:
        print(smollm2_path())
    except (CuveeError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
