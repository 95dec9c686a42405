"""Prints what an extra of pyproject.toml needs, one requirement per line.

`python extra_requirements.py EXTRA...`: so that an image installs its packages in a layer of their
own, which a change of the code does not touch.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
