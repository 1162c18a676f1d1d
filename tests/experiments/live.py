"""`live.py PLAN OUT`: a run of a real model in a process of its own, in small chunks, to be killed."""

from __future__ import annotations

import sys

from needlework.errors import NeedleworkError
from needlework.experiments import run, trials

if __name__ == "__main__":
    trials.CHUNK_TRIALS = 12
    try:
        sys.exit(not run.run(sys.argv[1], sys.argv[2], progress=False).sound)
    except NeedleworkError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
