"""`make bench`: every benchmark, one after the other, each in a process of its own. Exit code 1 if a goal is missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ORDER = ("kernels", "foundation", "engine", "peers", "heads", "pruning", "zoo", "ability", "shots", "long", "scale", "play")


def main() -> int:
    missed = []
    for name in sys.argv[1:] or ORDER:
        print(f"\n===== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=False).returncode:
            missed.append(name)
    print(f"\ngoals missed in: {', '.join(missed)}" if missed else "\nall goals reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
