"""CryptoMode: nothing on the disk in clear, nothing in the log; encrypted files that nobody can change unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.errors import ConfigError, FormatError, MissingDependencyError
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig, load_encrypted, quantize_static, save_encrypted
from quark.onnx.calibration.data.samples import Store, all_in_memory
from quark.onnx.graph.proto_file import read_header
from quark.onnx_ops.encryption import CHUNK, HEADER, TAG
from tests.models.onnx_zoo import Reader, cnn, images

KEY = bytes(range(32))
OTHER = bytes(32)


def quantized(output: Any = None, source: Any = None, **options: Any) -> onnx.ModelProto | None:
    config = QConfig(QLayerConfig(Int8Spec(), weight=Int8Spec()), extra_options=options)
    return ModelQuantizer(config).quantize_model(source or cnn(), output, Reader(images()))


@pytest.fixture(autouse=True)
def _without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUARK_ENCRYPTION_KEY", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [None, "AES-256"])
def test_the_model_is_returned_and_nothing_is_written_without_a_key(
    algorithm: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = quantized()
    capsys.readouterr()
    hidden = quantized(None, CryptoMode=True, EncryptionAlgorithm=algorithm, FillAllValueInfo=False)
    assert hidden == plain and capsys.readouterr().err == ""
    output = tmp_path / "q.onnx"
    assert quantized(output, CryptoMode=True, EncryptionAlgorithm=algorithm) == plain
    assert not list(tmp_path.iterdir())
    assert "CryptoMode" in capsys.readouterr().err
    assert quantize_static(cnn(), output, Reader(images()), crypto_mode=True) is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_with_a_key_the_output_is_written_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("QUARK_ENCRYPTION_KEY", KEY.hex())
    output = tmp_path / "q.onnx"
    model = quantized(output, CryptoMode=True, EncryptionAlgorithm="AES-256")
    assert model is not None and model == quantized()
    content = output.read_bytes()
    assert all(name.encode() not in content for node in model.graph.node for name in (node.name, node.op_type))
    assert load_encrypted(output) == load_encrypted(output, KEY) == model
    assert read_header(output) == model
    with pytest.raises(ConfigError, match="quantized already"):
        quantized(None, output)
    monkeypatch.delenv("QUARK_ENCRYPTION_KEY")
    with pytest.raises(ConfigError, match="There is no key"):
        quantized(None, output)


@pytest.mark.parametrize(
    "options",
    [
        {"Statistics": "s.npz"},
        {"SaveAndRestore": "s.json"},
        {"SaveTensorHistFig": True},
        {"FastFinetune": {"CacheDir": "cache"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_writes_files_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="off the disk; .* writes to it"):
        quantized(None, CryptoMode=True, **options)


def test_a_path_and_other_algorithms_are_refused(tmp_path: Path) -> None:
    onnx.save(cnn(), tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match=r"takes an onnx\.ModelProto, got str"):
        quantized(None, str(tmp_path / "m.onnx"), CryptoMode=True)
    with pytest.raises(ConfigError, match="EncryptionAlgorithm: 'DES'"):
        quantized(None, CryptoMode=True, EncryptionAlgorithm="DES")


def test_activations_stay_in_memory(tmp_path: Path) -> None:
    array = np.zeros(1000)
    spilled = Store(10, str(tmp_path))
    spilled["a"] = array
    assert list(tmp_path.rglob("*.npy"))
    with all_in_memory():
        held = Store(10, str(tmp_path / "none"))
    held["a"] = array
    assert held["a"] is array and not (tmp_path / "none").exists()


def large() -> onnx.ModelProto:
    """A model of three chunks."""
    model = cnn()
    model.doc_string = "x" * (2 * CHUNK)
    return model


@pytest.mark.parametrize("place", ["header", "random", "first", "last", "tag"])
def test_every_changed_byte_is_found(place: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "m.onnx"
    save_encrypted(large(), file, KEY)
    content = bytearray(file.read_bytes())
    position = {"header": 12, "random": HEADER.size - 1, "first": HEADER.size + 5, "last": -TAG - 1, "tag": -1}[place]
    content[position] ^= 1
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"another key, or changed|another version, or damaged"):
        load_encrypted(file, KEY)


def test_chunks_that_are_left_out_swapped_or_added_are_found(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "m.onnx"
    save_encrypted(large(), file, KEY)
    assert load_encrypted(file, KEY) == large()
    content = file.read_bytes()
    whole, step = content[HEADER.size :], CHUNK + TAG
    chunks = [whole[start : start + step] for start in range(0, len(whole), step)]
    assert len(chunks) == 3
    header, (a, b, c) = content[: HEADER.size], chunks
    for parts in ([a, b], [a, c], [b, a, c], [a, b, b, c], [a, b, c, c], [c], [], [a, b, c[:10]]):
        file.write_bytes(header + b"".join(parts))
        with pytest.raises(FormatError, match="another key, or changed or cut off"):
            load_encrypted(file, KEY)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "m.onnx"
    save_encrypted(cnn(), file, KEY)
    first = file.read_bytes()
    save_encrypted(cnn(), file, KEY)
    # The random bytes of the header differ, and so does everything else: no two files share a nonce.
    assert file.read_bytes()[HEADER.size :][:64] != first[HEADER.size :][:64]
    with pytest.raises(FormatError, match="another key"):
        load_encrypted(file, OTHER)
    with pytest.raises(ConfigError, match="32 bytes"):
        load_encrypted(file, b"short")
    for text in ("xyz", KEY.hex()[:-2]):
        monkeypatch.setenv("QUARK_ENCRYPTION_KEY", text)
        with pytest.raises(ConfigError, match="is no key: expected 64 hexadecimal digits") as refused:
            load_encrypted(file)
        assert text not in str(refused.value)
    plain = tmp_path / "plain.onnx"
    onnx.save(cnn(), plain)
    with pytest.raises(FormatError, match="no encrypted model"):
        load_encrypted(plain, KEY)


def test_the_package_is_named_where_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.errors._is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"cryptography.*openquark\[crypto\]"):
        save_encrypted(cnn(), tmp_path / "m.onnx", KEY)
