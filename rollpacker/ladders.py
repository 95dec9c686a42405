"""The speculation factors that each mode begins with, eta per level below the last.

`exact` and `paper` keep them unless the settings say otherwise; `auto` plans others from what it
measures. A mode that is not named has no level.
"""

from __future__ import annotations

DEFAULT_FACTORS: dict[str, tuple[float, ...]] = {
    "exact": (1.75, 2.0),
    "paper": (1.25,),
    "auto": (1.5,),
}
