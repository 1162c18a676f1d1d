"""Where the command `needlework` begins: a stop in its first moments, while modules come in, ends it quietly."""

from __future__ import annotations

import os
import signal


def stop_quietly(*_: object) -> None:
    os._exit(130)  # nothing has been begun that would have to be tidied up; `exit_on_error` takes over when something is


def main() -> None:
    signal.signal(signal.SIGINT, stop_quietly)
    from needlework.cli import main as run

    try:
        run()
    finally:
        for name in ("SIGINT", "SIGALRM"):  # all is done: a stop now would only spoil the exit code
            if number := getattr(signal, name, None):
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
