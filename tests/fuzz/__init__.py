"""A fuzzer for input that cuvee reads from others, and a soak test of its stores.

    python -m tests.fuzz --seconds 600 --seed 0          `make fuzz`
    python -m tests.fuzz --replay out/fuzz/blob-0-123.bin
    python tests/fuzz/soak.py --seconds 600              `make soak`

A *target* makes cases, which are bytes that depend only on (target, seed, number), and checks them: any bytes must give
a value of the documented shape or a `CuveeError`. Everything else is a finding: another exception, a crash, a hang,
memory that the bytes do not justify, or backends that disagree. `corpus/` holds past findings, which a test replays.
"""
