"""`make audit`: known holes in the locked packages, and their licences. Without a network it says so, and checks the licences."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = [ROOT / "requirements.lock", ROOT / "requirements-nodeps.lock"]
# Free to use beside Apache-2.0. A package that says something else, or nothing, is looked at by a person and then listed below.
FREE = re.compile(
    r"apache|\bmit\b|\bbsd|0bsd|psf|python software|isc\b|mpl|mozilla|unlicense|public domain|zlib|hpnd|cc0|cnri|bsl-1|boost",
    re.I,
)
NOT_FREE = re.compile(r"(?<!l)gpl|affero|proprietary|commercial|non-?commercial", re.I)
OFFLINE = r"ConnectionError|Max retries|Failed to (establish|resolve)|Temporary failure|timed out|ServiceError"
LOOKED_AT = {"chardet": "LGPL, used unchanged as a library"}  # package -> why it may be used


def locked() -> dict[str, str]:
    """Name and version of every locked package."""
    pinned = {}
    for lock in LOCKS:
        for line in lock.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([A-Za-z0-9_.-]+)==([^\s;]+)", line):
                pinned[match[1].lower()] = match[2]
    return pinned


def licence(name: str) -> str:
    """What a package says of its licence: its expression, its classifiers, or the first line of its text."""
    about = metadata(name)
    classified = [value.rpartition("::")[2].strip() for value in about.get_all("Classifier") or () if value.startswith("License")]
    told = [about.get("License-Expression"), *classified, (about.get("License") or "").strip().split("\n")[0][:80]]
    return "; ".join(dict.fromkeys(text for text in told if text)) or "nothing said"


def doubtful(names: list[str]) -> list[str]:
    """Packages whose licence is none that is known to be free."""
    found = []
    for name in names:
        try:
            said = licence(name)
        except PackageNotFoundError:
            continue  # locked for another platform
        if name not in LOOKED_AT and (not FREE.search(said) or NOT_FREE.search(said)):
            found.append(f"{name}: {said}")
    return found


def holes() -> int:
    """What pip-audit finds: 0 nothing, 1 something; where it cannot ask, 0 and a word about it."""
    call = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--disable-pip", "--no-deps"]
    call += [word for lock in LOCKS for word in ("-r", str(lock))]
    asked = subprocess.run(call, capture_output=True, text=True, check=False)
    said = (asked.stdout + asked.stderr).strip()
    if "No module named pip_audit" in said:
        print("holes: NOT CHECKED: pip-audit is not installed here (pip install pip-audit needs a network)")
        return 0
    if asked.returncode and re.search(
        r"ConnectionError|Max retries|Failed to (establish|resolve)|Temporary failure|timed out|ServiceError", said
    ):
        print("holes: NOT CHECKED: offline, the database of holes cannot be asked")
        return 0
    print(f"holes: {said.splitlines()[-1] if said else 'none known'}" if not asked.returncode else said)
    return asked.returncode


def main() -> int:
    pinned = locked()
    bad = doubtful(sorted(pinned))
    print(f"licences of {len(pinned)} locked packages: " + ("all free" if not bad else "to be looked at:\n  " + "\n  ".join(bad)))
    return holes() or bool(bad)


if __name__ == "__main__":
    sys.exit(main())
