"""Encrypted models: AES-256-GCM, in chunks that cannot be changed, left out, repeated or put in another order.

    header   b"QUARKAES" | version 1 | bytes of a chunk (uint32) | 7 random bytes
    chunk    ciphertext | tag of 16 bytes

The nonce of a chunk is the 7 random bytes, its number (uint32) and whether it is the last (one byte): the STREAM
construction of Hoang, Reyhanitabar, Rogaway and Vizar (2015). The header is authenticated with every chunk. Numbers are
big-endian. The key is never written anywhere.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from quark.base.files import atomic_file
from quark.errors import ConfigError, FormatError, require_packages

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["load_encrypted", "save_encrypted"]

MAGIC = b"QUARKAES"
HEADER = struct.Struct(">8sBI7s")
VERSION = 1
CHUNK = 1 << 20
TAG = 16
_KEY_BYTES = 32
KEY_VARIABLE = "QUARK_ENCRYPTION_KEY"
"""The environment variable that holds the key where none is passed: 64 hexadecimal digits."""


def save_encrypted(model: onnx.ModelProto, path: str | os.PathLike[str], key: bytes | None = None) -> None:
    """Write a model as an encrypted file, whole or not at all; nothing is ever on the disk in clear.

    Args:
        model: The model, weights inside; at most 2 GB.
        path: Where to; an existing file is replaced.
        key: 32 bytes. None: the 64 hexadecimal digits of the environment variable QUARK_ENCRYPTION_KEY.

    Raises:
        ConfigError: There is no key, or it is none.
        MissingDependencyError: cryptography is absent.
        OutputError: The file cannot be written.
    """
    cipher = _cipher(key)
    plain = memoryview(model.SerializeToString())
    header = HEADER.pack(MAGIC, VERSION, CHUNK, os.urandom(7))
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        for number, start in enumerate(range(0, max(1, len(plain)), CHUNK)):
            last = start + CHUNK >= len(plain)
            file.write(cipher.encrypt(_nonce(header, number, last), plain[start : start + CHUNK], header))


def load_encrypted(path: str | os.PathLike[str], key: bytes | None = None) -> onnx.ModelProto:
    """Read what `save_encrypted` wrote.

    Args:
        path: The file.
        key: As for `save_encrypted`.

    Raises:
        ConfigError: There is no key, or it is none.
        FormatError: Another key, or the file was changed, cut off, or is no encrypted model.
        MissingDependencyError: cryptography is absent.
    """
    cipher = _cipher(key)
    plain = bytearray()
    for part in _decrypted(Path(path), cipher):
        plain += part
    model = onnx.ModelProto()
    model.ParseFromString(memoryview(plain))
    return model


def is_encrypted(path: Path) -> bool:
    """Return True where a file begins as an encrypted model does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def environment_key() -> bytes | None:
    """The key of the environment; None where it holds none. Raises ConfigError for what is no key."""
    text = os.environ.get(KEY_VARIABLE)
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{KEY_VARIABLE} is no key: expected {2 * _KEY_BYTES} hexadecimal digits.")
    return key


def _cipher(key: bytes | None) -> AESGCM:
    if key is None:
        key = environment_key()
    if key is None:
        raise ConfigError(f"There is no key. Possible: {KEY_VARIABLE}=<{2 * _KEY_BYTES} hexadecimal digits>.")
    if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
        raise ConfigError(f"A key of AES-256 is {_KEY_BYTES} bytes; this one is not.")
    require_packages("Encryption of models", "crypto", "cryptography")
    # Late: nothing else needs it.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _nonce(header: bytes, number: int, last: bool) -> bytes:
    return header[-7:] + struct.pack(">I?", number, last)


def _decrypted(path: Path, cipher: AESGCM) -> Iterator[bytes]:
    """The chunks of a file, each checked. Raises FormatError."""
    from cryptography.exceptions import InvalidTag

    with path.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) != HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise FormatError(f"{path} is no encrypted model.")
        _, version, size, _ = HEADER.unpack(header)
        if version != VERSION or not 0 < size <= CHUNK:
            raise FormatError(f"{path} is an encrypted model of another version, or damaged.")
        number, block = 0, file.read(size + TAG)
        while True:
            following = file.read(size + TAG)
            try:
                yield cipher.decrypt(_nonce(header, number, not following), block, header)
            except (InvalidTag, ValueError):
                raise FormatError(f"{path} was encrypted with another key, or changed or cut off since.") from None
            if not following:
                return
            number, block = number + 1, following
