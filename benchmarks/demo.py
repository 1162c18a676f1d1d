"""Measure the short demo with cold caches: clock and processor seconds at every line that it prints.

    python -m benchmarks.demo [--threads 1]

The demo runs in a process of its own, whose compiled kernels, fonts and models go into an empty directory, as on a machine
on which needlework was just installed. Processor time is that of all threads; on a machine that does other work, too, it is
what the clock would show there on one idle core, and half of it a bound from below for two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(process: int) -> float:
    """Return the processor time of a running process (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="passed on to the demo")
    parser.add_argument("--warm", action="store_true", help="use this user's caches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        caches = ("NUMBA_CACHE_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "HF_HOME")
        cold = {} if options.warm else {name: str(Path(directory, name.lower())) for name in caches}
        words = ["demo", "--out", str(Path(directory, "run"))] + (["--threads", str(options.threads)] if options.threads else [])
        command = [sys.executable, "-u", "-m", "needlework", *words]
        began = time.perf_counter()
        with subprocess.Popen(
            command, env={**os.environ, **cold}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                used = processor_seconds(child.pid)
                print(f"{time.perf_counter() - began:6.1f} {used:6.1f}  {line}", end="", flush=True)
    print(f"in all {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
