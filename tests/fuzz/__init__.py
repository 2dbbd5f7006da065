"""A fuzzer of what cuvee reads from others, and a soak of its stores.

    python -m tests.fuzz --seconds 600 --seed 0          `make fuzz`
    python -m tests.fuzz --replay out/fuzz/blob-0-123.bin
    python tests/fuzz/soak.py --seconds 600              `make soak`

A *target* makes cases, bytes that depend on (target, seed, number) alone, and checks them: whatever the bytes are,
there is a value of the documented shape or an error of cuvee's. Anything else is a finding: another exception, a crash,
a hang, memory that the bytes do not justify, backends that disagree. `corpus/` holds past ones; a test replays them.
"""
