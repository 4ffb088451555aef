"""Errors that name what they are about."""

from __future__ import annotations

import pytest

from quark.core.checks import naming
from quark.errors import NonFiniteError


@pytest.mark.parametrize("said", ["an input is NaN", "down: an input is NaN"])
def test_a_layer_is_named_once(said: str) -> None:
    with pytest.raises(NonFiniteError) as caught, naming("block"), naming("down"):
        raise NonFiniteError(said)
    assert str(caught.value) == "block: down: an input is NaN"
