"""Copy the documentation's pages into the wheel, where `needlework explain` reads them. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a clone has docs/ itself
            folder = Path(self.build_lib, "needlework", "pages")
            folder.mkdir(parents=True, exist_ok=True)
            for page in Path(__file__).parent.glob("docs/*.md"):
                shutil.copy(page, folder)


setup(cmdclass={"build_py": BuildWithPages})
