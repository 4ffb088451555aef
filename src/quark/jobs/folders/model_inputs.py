"""Calibration and held-out data for a model folder, by what its class takes: text, images, audio, or arrays by name."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quark.base.data_files.arrays import ArrayHeader, read_npz
from quark.base.data_files.images import LABELS, files_in_turn, open_image
from quark.base.data_files.sounds import read_sound
from quark.base.json_objects import plain_json
from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import import_transformers, require_readable_tokenizer
from quark.core.checks import naming
from quark.errors import CalibrationError, ConfigError, FormatError, MissingDependencyError, one_line
from quark.torch.llm.answers import answered_texts
from quark.torch.llm.documents import documents, holds_documents, holds_media, is_dataset, lines_of, samples_of
from quark.torch.llm.text import read_text
from quark.torch.model.batches import main_inputs, most_tokens, text_config
from quark.torch.model.calibration_data import ModelArguments, placeholders_of, stored_batches, unpadded
from quark.torch.model.calibration_data.model_arguments import positional_parameters

PAIRS = "a folder of images, each beside its caption (1.png, 1.txt)"
Batch = Any
"""An input of `quantize_model`: a tensor of token ids, or arguments of the model by name."""


@dataclass(frozen=True)
class _Taking:
    """How samples are taken.

    Attributes:
        data: Where they are.
        limit: Most of them; None: all.
        length: Most tokens in one.
        packing: Whether texts are put one after another; None: where there are enough for one window.
    """

    data: Path
    limit: int | None
    length: int
    packing: bool | None


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and where its tokenizer and processors lie.

    Attributes:
        folder: Of the model.
        config: Its transformers config.
        model_class: Its class.
        dtype: Of floating-point inputs.
        taken: Which of more samples than are asked for.
    """

    folder: Path
    config: Any
    model_class: Any
    dtype: torch.dtype = torch.float32
    taken = "the first ones"
    is_network = False

    @property
    def names(self) -> list[str]:
        """The arguments of the model."""
        return list(inspect.signature(self.model_class.forward).parameters)[1:]

    def read(
        self,
        data: Path,
        limit: int,
        length: int,
        packing: bool | None = None,
        seed: int | None = None,
        answers: bool = False,
    ) -> Sequence[Batch]:
        """Batches of one sample.

        Args:
            data: A text file, JSON lines, the name of a dataset (see `quark.torch.llm.documents`), a folder of images
                or of audio files, or an .npz of arrays by the names of arguments.
            limit: Most batches.
            length: Most tokens in a text sample; a model with fewer positions gets fewer.
            packing: Whether texts are put one after another and cut into windows; None: for a causal
                language model, if there are enough for one window.
            seed: Of a choice among all samples, which keep their order; None: the first ones.
            answers: Whether documents that have answers are read one by one, as `AnsweredTexts`.

        Raises:
            CalibrationError: The data cannot be read, or are not what the model takes; says what it takes.
            FormatError: The folder lacks the tokenizer or processor that is needed.
        """
        if not is_dataset(data) and not data.exists():
            raise CalibrationError(f"{data} is not there.")
        if packing is not None and not self.continues_text:
            raise ConfigError(
                f"--packing and --no-packing are for causal language models; {self.model_class.__name__} takes "
                "each sample by itself. Possible: neither."
            )
        limit = min(limit, sys.maxsize)  # islice takes no more
        most = limit if seed is None else None
        length = self.longest(length)
        if answers and self.continues_text and holds_documents(data):
            answered = answered_texts(self.tokenizer, data, length, limit)
            if answered is not None:
                return answered
        found = self._samples(_Taking(data, most, length, packing))
        samples = list(itertools.islice(found, limit)) if seed is None else _chosen(found, limit, seed)
        if not samples:
            raise CalibrationError(f"{data} holds no sample: {self._wanted()}.")
        arguments = ModelArguments(self.names, bool(self.config.is_encoder_decoder), placeholders_of(self.config))
        with naming(str(data)):
            samples = [part for sample in samples for part in unpadded(sample, arguments)]
        if not samples:
            raise CalibrationError(f"{data} holds masked positions only.")
        return samples

    def files(self, folder: Path) -> list[Path]:
        """The files of images or audio that `read` reads of a folder, in its order."""
        return files_in_turn(folder, _is_sample)

    def longest(self, length: int) -> int:
        """The most tokens in a sample of text, of so many at most, that the model has positions for."""
        text = text_config(self.config)
        offset = (getattr(text, "pad_token_id", None) or 0) + 1
        positions = most_tokens(text, length + offset)
        # Positions of some encoders begin after that of the padding token; a sample two tokens shorter harms no other.
        return min(length, positions if self.model_class.can_generate() else max(1, positions - offset))

    def words(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Raises FormatError as `read` does."""
        tokenizer = self.tokenizer
        return [tokenizer.decode([token]) for token in ids]

    @property
    def tokenizer(self) -> Any:
        """That of the folder. Raises FormatError as `read` does."""
        return self._processor("AutoTokenizer")

    @property
    def reads_text(self) -> bool:
        """True where a text alone is enough for a sample."""
        return self._main_input == "input_ids" and ("pixel_values" not in self.names or self.model_class.can_generate())

    @property
    def _reads_pairs(self) -> bool:
        """True where a sample is an image and a text."""
        return {"input_ids", "pixel_values"} <= {*self.names} and not self.model_class.can_generate()

    @property
    def _main_input(self) -> str | None:
        """The only argument that the model needs; None where it needs several, which only arrays by name give."""
        names = main_inputs(self.model_class)
        return names[0] if len(names) == 1 else None

    @property
    def continues_text(self) -> bool:
        """True where it is a causal language model, which takes any window of a text."""
        return self.reads_text and self.model_class.can_generate() and not self.config.is_encoder_decoder

    def _samples(self, taking: _Taking) -> Iterator[Batch]:
        data = taking.data
        if data.suffix == ".npz":
            return self._arrays(data)
        if data.is_dir() and next(data.glob("*.npz"), None) is not None:
            return iter(stored_batches(data, self.model_class, dtype=self.dtype))
        main = self._main_input
        if self._reads_pairs:
            return self._pairs(taking)
        if main is None:
            raise CalibrationError(f"{data}: {self._wanted()}.")
        if main == "input_ids":
            if not is_dataset(data):
                self._require(data, folder=False)
            if not self.continues_text:
                return self._lines(taking)
            if holds_media(data):
                return self._chats(taking)
            return iter(samples_of(self.tokenizer, data, taking.length, taking.packing, taking.limit))
        self._require(data, folder=True)
        if main == "pixel_values":
            return self._images(data)
        if main in ("input_features", "input_values"):
            return self._audio(taking)
        raise CalibrationError(f"{data}: {self._wanted()}.")

    def _wanted(self) -> str:
        """The kinds of data that may be given, for errors."""
        kinds = {"input_ids": "a text file, JSON lines (.jsonl)", "pixel_values": "a folder of images",
                 "input_features": "a folder of audio files", "input_values": "a folder of audio files"}  # fmt: skip
        kind = PAIRS if self._reads_pairs else kinds.get(self._main_input or "")
        arrays = f"an .npz with arrays of samples by the names of arguments ({', '.join(self.names[:6])} ...)"
        return f"{self.model_class.__name__} takes {f'{kind}, or ' if kind else ''}{arrays}"

    def _require(self, data: Path, folder: bool) -> None:
        if data.is_dir() != folder:
            came = "a folder" if data.is_dir() else "a file"
            raise CalibrationError(f"{data} is {came}: {self._wanted()}.")

    def _processor(self, auto: str) -> Any:
        transformers = import_transformers()
        kinds = {"AutoTokenizer": "tokenizer", "AutoImageProcessor": "image processor", "AutoProcessor": "processor"}
        kind = kinds.get(auto, "feature extractor")
        if auto == "AutoTokenizer":
            require_readable_tokenizer(self.folder)
        with as_format_error(self.folder, f"holds no {kind} that transformers loads"):
            loaded = getattr(transformers, auto).from_pretrained(
                self.folder, trust_remote_code=False, local_files_only=True
            )
            files = {"tokenizer.json", "tokenizer.model", *getattr(loaded, "vocab_files_names", {}).values()}
            # Some classes of transformers make a tokenizer without words where there is no file.
            if auto == "AutoTokenizer" and not any((self.folder / name).is_file() for name in files):
                raise FileNotFoundError(f"none of {', '.join(sorted(files))} is there")
            return loaded

    def _arguments_of(self, values: Any) -> dict[str, torch.Tensor]:
        """The arguments of the model among what a tokenizer or processor gives, in the dtype of the model."""
        taken = {name: torch.as_tensor(values[name]) for name in values.keys() if name in self.names}  # noqa: SIM118
        return {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in taken.items()}

    def _decoder(self, ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the input of a decoder that is taught these tokens: them after the start token, without the last."""
        if not self.config.is_encoder_decoder or "decoder_input_ids" not in self.names:
            return {}
        start = torch.tensor([[self._start_token()]])
        return {"decoder_input_ids": start if ids is None else torch.cat([start, ids[:, :-1]], 1)}

    def _start_token(self) -> int:
        """The first token of a decoder, as transformers' generate has it; T5's is the padding token.

        transformers 5 moves it from config.json to generation_config.json when it saves a model.
        """
        path, beside = self.folder / "generation_config.json", {}
        if path.is_file():
            with as_format_error(self.folder, "has a generation_config.json that cannot be read"):
                beside = plain_json(path.read_text(encoding="utf-8"))
        name = "decoder_start_token_id"
        tokens = [getattr(self.config, name, None), beside.get(name) if isinstance(beside, dict) else None]
        tokens += [getattr(self.config, other, None) for other in ("bos_token_id", "pad_token_id")]
        return next((token for token in tokens if isinstance(token, int)), 0)

    def _lines(self, taking: _Taking) -> Iterator[Batch]:
        """Each line of a text as one sample, with the special tokens that the model was trained with."""
        tokenizer = self._processor("AutoTokenizer")
        for document in lines_of(taking.data):
            values = tokenizer(document.text(tokenizer), return_tensors="pt", truncation=True, max_length=taking.length)
            yield self._arguments_of(values) | self._decoder(values["input_ids"])

    def _chats(self, taking: _Taking) -> Iterator[Batch]:
        """Each conversation with images or sounds as one sample, whole: a cut would part them from their tokens."""
        if taking.packing:
            raise ConfigError("--packing: conversations with images or sounds are samples by themselves.")
        if not {"pixel_values", "input_features", "input_values"}.intersection(self.names):
            raise CalibrationError(
                f"{taking.data} holds images or sounds, and {self.model_class.__name__} reads text alone. Possible: "
                "lines without them."
            )
        processor = self._processor("AutoProcessor")
        # In the place of a processor that is not there, transformers has others.
        if not hasattr(processor, "tokenizer"):
            raise FormatError(
                f"{self.folder} holds no processor of images or sounds beside text, which {taking.data} needs. "
                "Possible: processor_config.json of the folder that the model comes from."
            )
        if getattr(processor, "chat_template", None):
            processor.tokenizer.chat_template = processor.chat_template
        for document in documents(taking.data):
            yield self._arguments_of(document.processed(processor, taking.data.parent))

    def _images(self, data: Path) -> Iterator[Batch]:
        processor = self._processor("AutoImageProcessor")
        for _, image in _files(data, _open_image):
            yield self._arguments_of(processor(image, return_tensors="pt"))

    def _pairs(self, taking: _Taking) -> Iterator[Batch]:
        """Images, each with its caption in a text file of the same name."""
        self._require(taking.data, folder=True)
        processor, tokenizer = self._processor("AutoImageProcessor"), self._processor("AutoTokenizer")
        for path, image in _files(taking.data, _open_image):
            caption = path.with_suffix(".txt")
            if not caption.is_file():
                raise CalibrationError(f"{path}: the model takes image and text; {caption.name} has to hold a caption.")
            text = tokenizer(read_text(caption).strip(), return_tensors="pt", truncation=True, max_length=taking.length)
            yield self._arguments_of(processor(image, return_tensors="pt")) | self._arguments_of(text)

    def _audio(self, taking: _Taking) -> Iterator[Batch]:
        """Recordings; a decoder gets the transcript in a text file of the same name, else its first token."""
        extractor = self._processor("AutoFeatureExtractor")
        for path, (rate, waveform) in _files(taking.data, _open_audio):
            if rate != extractor.sampling_rate:
                raise CalibrationError(
                    f"{path} has {rate} samples a second; the model takes {extractor.sampling_rate}."
                )
            values = self._arguments_of(extractor(waveform, sampling_rate=rate, return_tensors="pt"))
            transcript, ids = path.with_suffix(".txt"), None
            if self.config.is_encoder_decoder and transcript.is_file():
                text = read_text(transcript).strip()
                ids = self._processor("AutoTokenizer")(
                    text, return_tensors="pt", truncation=True, max_length=taking.length
                )
            yield values | self._decoder(None if ids is None else ids["input_ids"])

    def _arrays(self, data: Path) -> Iterator[Batch]:
        """The rows of arrays, each named for an argument."""
        try:
            arrays = {name: torch.from_numpy(x) for name, x in read_npz(data, partial(self._check_rows, data)).items()}
        except (FormatError, TypeError) as error:  # TypeError: texts, of which torch has no tensors
            raise CalibrationError(f"{data} cannot be read: {one_line(error)}") from None
        for row in range(next((len(x) for x in arrays.values() if x.ndim), 0)):
            sample = self._arguments_of({name: x[row : row + 1] for name, x in arrays.items()})
            for name, x in sample.items():
                if not torch.isfinite(x).all():
                    raise CalibrationError(
                        f"{data}: the sample {row} of {name} holds NaN or Inf in {x.dtype}. Possible: leave it out."
                    )
            yield sample

    def _check_rows(self, data: Path, headers: Mapping[str, ArrayHeader]) -> None:
        """Raise CalibrationError for arrays of other arguments, or of unlike numbers of samples."""
        unknown = [name for name in headers if name not in self.names]
        counts = {name: header.shape[0] if header.shape else 0 for name, header in headers.items()}
        if unknown or len(set(counts.values())) != 1:
            what = f"unknown: {', '.join(unknown)}" if unknown else f"samples: {counts}"
            raise CalibrationError(
                f"{data} does not hold equally many samples for arguments ({what}): {self._wanted()}."
            )


def _chosen(samples: Iterator[Batch], limit: int, seed: int) -> list[Batch]:
    """As many of all samples, each as likely as another, in their order; never more than these are kept (Vitter's
    algorithm R).
    """
    choice, kept = random.Random(seed), list(enumerate(itertools.islice(samples, limit)))
    for index, sample in enumerate(samples, limit):
        place = choice.randrange(index + 1)
        if place < limit:
            kept[place] = (index, sample)
    return [sample for _, sample in sorted(kept, key=lambda item: item[0])]


def _is_sample(path: Path) -> bool:
    """Return whether a file of a folder is a sample; texts and labels beside samples belong to them."""
    return path.is_file() and path.suffix != ".txt" and path.name != LABELS


def _files(folder: Path, open_file: Callable[[Path], Any]) -> Iterator[tuple[Path, Any]]:
    """The files of a folder as `files_in_turn` has them, opened."""
    for path in files_in_turn(folder, _is_sample):
        yield path, open_file(path)


def _open_image(path: Path) -> Any:
    try:
        return open_image(path, "RGB")
    except MissingDependencyError:
        raise
    except Exception as error:  # noqa: BLE001 - of Pillow: each format has its own
        raise CalibrationError(f"{path} cannot be read as an image: {one_line(error).rstrip('.')}.") from None


def _open_audio(path: Path) -> tuple[int, Any]:
    """Samples a second, and the mean of the channels between -1 and 1."""
    try:
        return read_sound(path)
    except ValueError as error:
        raise CalibrationError(f"{path} {one_line(error)}") from None


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a network, as `ModelInputs` has them for a model of transformers.

    Attributes:
        model_class: Its class.
        dtype: That it computes in; None: of calls as they were recorded.
    """

    model_class: Any
    dtype: Any = None
    reads_text = continues_text = False
    is_network = True
    taken = "spread evenly over all"

    @property
    def names(self) -> list[str]:
        """The arguments of the network."""
        return [parameter.name for parameter in positional_parameters(self.model_class.forward) or ()][1:]

    def words(self, ids: Sequence[int]) -> list[str]:
        """Raises ConfigError: a network reads no tokens."""
        raise ConfigError(
            f"{self.model_class.__name__} reads no tokens, but the text of {len(ids)} tokens was asked for."
        )

    def read(
        self,
        data: Path,
        limit: int,
        length: int,
        packing: bool | None = None,
        seed: int | None = None,
        answers: bool = False,
    ) -> Sequence[dict[str, Any]]:
        """Recorded calls, of more than `limit` as many as that, spread evenly over all.

        Args:
            data: See `stored_batches`.
            limit: Most calls.
            length, packing, answers: Of texts, which a network does not read.
            seed: Of a choice by chance, which there is none of here.

        Raises:
            CalibrationError: These are no recorded calls of the network.
            ConfigError: An option that says how texts are taken.
        """
        for flag, value in {"--packing": packing, "--seed": seed}.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} does not apply to recorded steps, which are taken evenly. Possible: leave it out."
                )
        if data.suffix != ".npz" and not data.is_dir():
            raise CalibrationError(
                f"{data} has no recorded steps of {self.model_class.__name__} ({', '.join(self.names[:4])} ...). "
                "Possible: a folder of .npz files as quark.torch.record_steps writes them, or one .npz file."
            )
        return stored_batches(data, self.model_class, limit, self.dtype)
