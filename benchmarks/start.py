"""How long `needlework ask` takes on a model of the zoo, against importing torch and transformers.

    python -m benchmarks.start

Both are started alternately, each in a process of its own. Printed are medians of processor time and of clock time, and
their ratio (of processor time at most 1.5 is the aim; clock time depends on what else the machine does).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

ROUNDS = 7
ASK = [
    "-m",
    "needlework",
    "ask",
    "tiny-griffin",
    "the code of mira is",
    "--intervene",
    "none",
    "--intervene",
    "ablate_attention()",
]
IMPORT = ["-c", "import torch, transformers"]


def measure(words: list[str]) -> tuple[float, float]:
    """Return processor and clock seconds of a Python process."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, time.perf_counter() - began


def main() -> None:
    measure(IMPORT), measure(ASK)  # files come into the page cache
    pairs = [(measure(IMPORT), measure(ASK)) for _ in range(ROUNDS)]
    for i, what in enumerate(("processor", "clock")):
        plain, ask = (statistics.median(pair[j][i] for pair in pairs) for j in range(2))
        print(f"{what}: import torch, transformers {plain:.2f} s; ask {ask:.2f} s; ratio {ask / plain:.2f}")


if __name__ == "__main__":
    main()
