"""Prints what extras of pyproject.toml need, one requirement per line.

`python extra_requirements.py EXTRA[,EXTRA]...`: so that an image installs its packages in a layer
of their own, which a change of the code does not touch.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
print(*project["dependencies"], sep="\n")
for extra in ",".join(sys.argv[1:]).split(","):
    print(*project["optional-dependencies"][extra], sep="\n")
