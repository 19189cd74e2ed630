"""Prints what a pyproject.toml depends on, one requirement a line: ``python dependencies.py pyproject.toml [EXTRAS]``.

So the image's layer of dependencies can be built before the code is there. ``EXTRAS``: names separated by commas.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: str = "") -> list[str]:
    """The dependencies, those of the extras behind them.

    :raises KeyError: there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project.get("optional-dependencies", {})
    wanted = list(project["dependencies"])
    for extra in filter(None, extras.split(",")):
        wanted += optional[extra.strip()]
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), *sys.argv[2:3])))
