"""Rows that reasoning-gym generates, by the name of its data set: the same for the same options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollpacker.data.errors import DataError

_DEFAULTS = {"size": 1000, "seed": 0}


def generate(name: str, options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`prompt` and `reference` of every entry. options: `size`, `seed` and the data set's own.

    Raises DataError for an unknown name or an option that the data set refuses.
    """
    place = Path(name)
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            place, "needs reasoning-gym: pip install 'rollpacker[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        import difflib

        close = difflib.get_close_matches(name, DATASETS, n=1) or sorted(DATASETS)[:3]
        raise DataError(place, f"is no data set of reasoning-gym; known are {', '.join(close)} ...")
    try:
        dataset = reasoning_gym.create_dataset(name, **{**_DEFAULTS, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(place, f"refuses its options: {error}", field="options") from error
    for entry in dataset:
        yield {"prompt": entry["question"], "reference": {"dataset": name, "entry": entry}}
