"""The tensors that a reader finds in a folder: transformers' loader, of some class, by names in the files alone.

name in the file  --(renamings, then mergers of transformers)-->  tensor of the class
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from quark.base.libraries.transformers import may_be_missing, tied_weights
from quark.torch.model.names.in_model import loaded_into


@dataclass(frozen=True)
class Found:
    """The tensors that a class finds.

    Attributes:
        places: Name in the file -> name in the class.
        lost: Names in the file for which the class has no place; its loader leaves them out.
        missing: Tensors of the class for which there is nothing in the file; its loader makes them up.
    """

    places: dict[str, str]
    lost: list[str]
    missing: list[str]


def found_by(empty: Any, stored: Iterable[str]) -> Found:
    """Return the tensors that transformers' loader finds in a float folder with these names.

    Args:
        empty: An empty model of the class that loads.
        stored: Names of the tensors in the files.
    """
    own = dict(empty.state_dict())
    into = loaded_into(empty, own)
    places = {name: into(name) for name in stored}
    there = set(chain.from_iterable(places.values()))
    ties = tied_weights(empty)
    there |= {one for pair in ties.items() if there.intersection(pair) for one in pair}
    optional = may_be_missing(empty)
    missing = sorted(name for name in own if name not in there and not any(re.search(p, name) for p in optional))
    first = {name: made[0] for name, made in places.items()}
    return Found(first, sorted(name for name in places if first[name] not in own), missing)
