"""While a library loads a folder, no connection is made, whichever library wants one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from quark.base.libraries.loading import as_format_error
from quark.errors import FormatError
from quark.torch.model.model_folder import load_config


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        yield listening.getsockname()
        with pytest.raises(TimeoutError):
            listening.accept()


def test_a_connection_within_is_refused_and_said(server: tuple[str, int], tmp_path: Path) -> None:
    found = pytest.raises(FormatError, match=r"in it cannot be loaded: it leads to a connection to 127\.0\.0\.1, and a")
    with found, as_format_error(tmp_path / "in it"):
        socket.create_connection(server)
    with pytest.raises(FormatError, match=r"a connection to nowhere\.invalid, and"), as_format_error(tmp_path):
        socket.getaddrinfo("nowhere.invalid", 443)


def test_what_a_library_makes_of_it_is_said_all_the_same(
    server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a class of transformers would that asks a server although it is told not to."""

    def asks(*args: Any, **options: Any) -> None:
        try:
            socket.create_connection(server)
        except OSError:
            raise OSError("We could not connect to the hub.") from None

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asks)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    with pytest.raises(FormatError, match="it leads to a connection to 127"):
        load_config(tmp_path, {"model_type": "llama"})
    with pytest.raises(FormatError, match="it leads to a connection to 127"), as_format_error(tmp_path):
        load_config(tmp_path, {"model_type": "llama"})


def test_outside_and_for_trusted_code_connections_are_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with as_format_error(tmp_path, trusted=True), socket.create_connection(listening.getsockname()):
            pass
        with as_format_error(tmp_path):
            first, second = socket.socketpair()  # within this machine
            first.close()
            second.close()
        with socket.create_connection(listening.getsockname()):
            pass
