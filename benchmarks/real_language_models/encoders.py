"""Sentence encoders: their rows, and how far the embeddings of held-out sentences are from those of the float model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.real_language_models.bench import Bench
from benchmarks.real_language_models.peers import EMBEDDED, pooled
from benchmarks.real_language_models.rows import FLOATS, INTEGERS, ONNX, QUARK, Row
from benchmarks.real_language_models.texts import sentences
from quark.core.schemes import SCHEMES

Array = Any
Encoder = Callable[[Mapping[str, Array]], Array]
BATCH, CALIBRATION, HELD_OUT = 16, 128, 300
"""Sentences that are embedded at once, that are calibrated on, and that are compared."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
FILES = ("*.safetensors", "*.onnx", "*.onnx.data", "*.pt")
COLUMNS = ("dB", "cosine", "least", "top 1", "top 10", "CPU s", "MB", "size", "embed s")
TABLE = "*embeddings=int8_wo"
"""The tables of embeddings in 8 bits, too, with a scale for each row."""


def _rows() -> list[Row]:
    """The rows of an encoder: every scheme, the efforts of those that have any, programs, ONNX files, peers."""
    ours: dict[str, tuple[str, ...]] = {}
    for scheme in SCHEMES:
        ours[scheme] = ("--scheme", scheme)
        if scheme in (*INTEGERS, *FLOATS):
            goal = ("--for", "transformers", "--scheme", scheme, "--effort")
            ours |= {f"{scheme}:{effort}": (*goal, effort) for effort in ("balanced", "best")}
    for scheme in ("int8_wo", "uint4_wo_64", "bfloat16"):
        ours[f"{scheme}+tables"] = ("--scheme", scheme, "--layer", TABLE)
    for program in ("transformers", "vllm", "sglang", "onnxruntime"):
        ours[f"for {program}"] = ("--for", program)
    ours["int8_wo onnx"] = ("--scheme", "int8_wo", "--export-format", "onnx")
    ours["int8_wo+tables onnx"] = (*ours["int8_wo onnx"], "--layer", TABLE)
    reads = {name for name, layer in SCHEMES.items() if layer.needs_data}
    found = [Row(name, QUARK, words, ":" in name or name in reads) for name, words in ours.items()]
    found += [Row("onnx, no samples", QUARK, (ONNX,), False), Row("onnx, samples", QUARK, (ONNX,), True)]
    for config in ("INT8_CPU_DYNAMIC", "MATMUL_NBITS", "A8W8", "INT8_TRANSFORMER_DEFAULT"):
        found.append(Row(f"onnx {config}", QUARK, (ONNX, "--config", config), "DYNAMIC" not in config))
    peers = (
        ("sentence-transformers", "onnx", "float32"),
        ("sentence-transformers", "onnx", "int8_dynamic"),
        ("torchao", "nearest", "int8_wo"),
        ("torchao", "nearest", "int8_dynamic"),
        ("torchao", "nearest", "int4_wo_128"),
        ("llm-compressor", "nearest", "W8A8"),
        ("llm-compressor", "gptq", "uint4_wo_64"),
        ("auto-round", "tuned", "uint4_wo_64"),
    )
    return [*found, *(Row(f"{package} {scheme}+{how}", package, (how, scheme)) for package, how, scheme in peers)]


class EncoderBench(Bench):
    """A float encoder with its sentences."""

    rows: ClassVar = {row.name: row for row in _rows()}
    columns = COLUMNS
    title = "embeddings of held-out sentences, to those of the float model"

    def __init__(self, model: str, place: Path) -> None:
        super().__init__(model, place)
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.float)
        self.calibration = sentences(self.texts["calibration"].read_text("utf-8"), CALIBRATION)
        # Those of a batch are of one length, near enough, so that little of it is padding.
        self.held_out = sorted(sentences(self.texts["prose"].read_text("utf-8"), HELD_OUT), key=len)
        self.lines = place / "sentences.txt"
        self.lines.write_text("\n".join(self.calibration), "utf-8")

    @cached_property
    def _wanted(self) -> Array:
        return self._embedded(_of_folder(self.float))[0]

    def windows(self) -> Path:
        """The token ids of the sentences, for peers."""
        file = self.float.with_suffix(".sentences.json")
        ids = {"calibration": self.calibration, "held out": self.held_out}
        file.write_text(json.dumps({name: self.tokenizer(list(given)).input_ids for name, given in ids.items()}))
        return file

    def words(self, row: Row) -> list[str]:
        """The model of a row of quark's, and the options."""
        if ONNX not in row.words:
            data = ("--calib", str(self.lines), "--samples", str(CALIBRATION)) if row.data else ()
            return [str(self.float), *row.words, *data, "--no-verdict"]
        data = ("--calib", str(self._samples())) if row.data else ()
        return [str(self._onnx()), *row.words[1:], *data]

    def measured(self, output: Path) -> dict[str, Any]:
        """Compare embeddings of unit length.

        Args:
            output: A folder of transformers, an ONNX file or a folder of one, or a folder with EMBEDDED.

        Returns:
            "db": SQNR of the embeddings; "cosine", "least": their mean and smallest cosine; "top 1", "top 10": the
            share of the nearest sentences that are the nearest to the float model, too; "mb": size of the model on the
            disk; "embed": CPU seconds for all sentences, None where the peer ran them.
        """
        wanted = self._wanted
        given = output / EMBEDDED
        found, seconds = (np.load(given), None) if given.exists() else self._embedded(_encoder(output))
        noise, cosines = np.square(found - wanted).sum(), (wanted * found).sum(1)
        return {
            "db": float(10 * np.log10(np.square(wanted).sum() / noise)) if noise else float("inf"),
            "cosine": float(cosines.mean()),
            "least": float(cosines.min()),
            "top 1": _shared(wanted, found, 1),
            "top 10": _shared(wanted, found, 10),
            "mb": _bytes(output) / 1e6,
            "embed": seconds,
        }

    def cells(self, found: dict[str, Any]) -> list[str]:
        """The columns of a row."""
        embed = "" if found["embed"] is None else f"{found['embed']:.1f}"
        near = [f"{100 * found[name]:.1f}%" for name in ("top 1", "top 10")]
        cosines = [f"{found['cosine']:.5f}", f"{found['least']:.4f}"]
        costs = [f"{found['cpu_seconds']:.0f}", f"{found['peak_mb']:.0f}", f"{found['mb']:.1f}"]
        return [f"{found['db']:.1f}", *cosines, *near, *costs, embed]

    def _embedded(self, encoder: Encoder) -> tuple[Array, float]:
        """The embeddings of the held-out sentences, and the CPU seconds that they take."""
        made, start = [], time.process_time()
        for first in range(0, len(self.held_out), BATCH):
            batch = self.tokenizer(list(self.held_out[first : first + BATCH]), padding=True)
            fed = {name: np.array(values, np.int64) for name, values in batch.items()}
            made.append(pooled(encoder(fed), fed["attention_mask"]))
        return np.concatenate(made), time.process_time() - start

    def _onnx(self) -> Path:
        """The float model as torch exports it."""
        file = self.float.with_suffix(".onnx")
        if not file.exists():
            export(self.float, file)
        return file

    def _samples(self) -> Path:
        """Tokens of the calibration sentences by the names of the inputs of the ONNX file, all of one length."""
        file = self.float.with_suffix(".npz")
        batch = self.tokenizer(list(self.calibration), padding=True)
        np.savez(file, **{name: np.array(batch[name], np.int64) for name in INPUTS})
        return file


def _shared(wanted: Array, found: Array, count: int) -> float:
    """The share of the `count` nearest sentences of each sentence that two sets of embeddings agree on."""
    nearest = []
    for embeddings in (wanted, found):
        likeness = embeddings @ embeddings.T
        np.fill_diagonal(likeness, -np.inf)
        nearest.append(np.argsort(-likeness, axis=1)[:, :count])
    both = [len({*one} & {*other}) for one, other in zip(*nearest, strict=True)]
    return float(np.mean(both)) / count


def _of_folder(folder: Path) -> Encoder:
    """The model of a folder, in PyTorch."""
    import torch
    from transformers import AutoModel

    import quark.torch  # noqa: F401 - lets transformers read what it wrote

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(folder).eval()

    def hidden(fed: Mapping[str, Array]) -> Array:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(x) for name, x in fed.items()}).last_hidden_state.float().numpy()

    return hidden


def _of_file(file: Path) -> Encoder:
    """The model of an ONNX file, in ONNX Runtime, which is fed what it takes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options)
    names = [each.name for each in session.get_inputs()]
    return lambda fed: session.run(None, {name: fed[name] for name in names})[0]


def _encoder(output: Path) -> Encoder:
    """The model that a row wrote."""
    if output.is_file():
        return _of_file(output)
    file = next(output.glob("**/*.onnx"), None)
    return _of_folder(output) if file is None else _of_file(file)


def _bytes(output: Path) -> int:
    """The size of the files of a model, without its tokenizer."""
    files = [output] if output.is_file() else [file for end in FILES for file in output.glob(f"**/{end}")]
    return sum(file.stat().st_size for file in files)


def export(folder: Path, file: Path) -> None:
    """Write the float model of a folder as an ONNX file for any number of sentences and words."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in INPUTS}
    axes = {name: {0: "batch", 1: "sequence"} for name in INPUTS}
    torch.onnx.export(
        model, (), file, kwargs=example, dynamo=True, dynamic_shapes=axes, input_names=[*INPUTS],
        output_names=["last_hidden_state", "pooler_output"], external_data=False, verbose=False,
    )  # fmt: skip
