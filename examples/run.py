"""Run the notebooks of this directory and store their outputs: python examples/run.py [NAME ...]"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def notebooks() -> list[Path]:
    return sorted(HERE.glob("*.ipynb"))


def run(path: Path) -> Any:
    """Run all cells of a notebook in a temporary directory, and return the notebook with their outputs."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="needlework-") as folder:
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True)
        client.execute(cwd=folder)  # plans and models are written there
    for cell in notebook.cells:
        if "outputs" in cell:  # warnings of libraries name paths of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


if __name__ == "__main__":
    for path in notebooks():
        if len(sys.argv) == 1 or path.stem in sys.argv[1:]:
            nbformat.write(run(path), path)
            print(path.name, flush=True)
