"""Batches without their padding: which positions a mask says are real, and what is cut with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from quark.errors import CalibrationError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.model.calibration_data import ModelArguments, calibration_data, unpadded
from tests.pretended_gpu import PretendedGpu

IDS = torch.arange(1, 11).reshape(2, 5)
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
TEXT, PAIR = ModelArguments(), ModelArguments(has_decoder=True)


def shapes(batch: Any, arguments: ModelArguments = TEXT) -> list[dict[str, tuple[int, ...]]]:
    return [{name: tuple(x.shape) for name, x in part.items()} for part in unpadded(batch, arguments)]


@pytest.mark.parametrize("form", [dict, BatchEncoding, lambda batch: [batch]], ids=["dict", "encoding", "list"])
def test_samples_are_cut_to_their_real_positions(form: Any) -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
    first, second = unpadded(form(batch), TEXT)
    assert {name: x.tolist() for name, x in first.items()} == {
        "input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]], "position_ids": [[0, 1, 2]]
    }  # fmt: skip
    assert second["input_ids"].tolist() == [[7, 8, 9, 10]]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3]]


def test_what_masks_nothing_stays_the_object_that_it_is() -> None:
    whole = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    for batch in (IDS, whole, {"input_ids": IDS}, (IDS, torch.ones_like(IDS))):
        (same,) = unpadded(batch, ModelArguments(["input_ids", "attention_mask"]))
        assert same is batch


def test_samples_of_one_length_stay_together_and_empty_ones_are_left_out() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    assert shapes({"input_ids": IDS, "attention_mask": mask}) == [{"input_ids": (2, 3), "attention_mask": (2, 3)}]
    mask = torch.tensor([[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    assert shapes({"input_ids": IDS, "attention_mask": mask}) == [{"input_ids": (1, 5), "attention_mask": (1, 5)}]
    assert shapes({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}) == []


def test_arguments_by_place_and_arrays_are_cut_too() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
            return input_ids

    found = list(calibration_data(Model(), [(IDS.numpy(), MASK.numpy(), np.zeros((2, 5)))]) or ())
    assert [[x.tolist() for x in part] for part in found] == [
        [[[1, 2, 3]], [[1, 1, 1]], [[0.0] * 3]], [[[7, 8, 9, 10]], [[1, 1, 1, 1]], [[0.0] * 4]]
    ]  # fmt: skip


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril() & MASK.bool()[:, None, None]
LARGE = {
    "bool": CAUSAL,
    "1 and 0": CAUSAL.long(),
    "float 1 and 0": CAUSAL.float(),
    "least": torch.zeros(2, 1, 5, 5).masked_fill(~CAUSAL, torch.finfo(torch.float32).min),
    "-1e4 in bfloat16": torch.zeros(2, 1, 5, 5).masked_fill(~CAUSAL, -1e4).bfloat16(),
    "-inf, three dimensions": torch.zeros(2, 5, 5).masked_fill(~CAUSAL[:, 0], -torch.inf),
}


@pytest.mark.parametrize("mask", LARGE.values(), ids=LARGE)
def test_masks_of_queries_and_keys(mask: torch.Tensor) -> None:
    first, second = unpadded({"input_ids": IDS, "attention_mask": mask}, TEXT)
    assert first["input_ids"].tolist() == [[1, 2, 3]]
    assert second["input_ids"].tolist() == [[7, 8, 9, 10]]
    assert torch.equal(first["attention_mask"], mask[:1, ..., :3, :3])
    assert torch.equal(second["attention_mask"], mask[1:, ..., 1:, 1:])


def test_packed_sequences_are_real_everywhere() -> None:
    """Two texts in a row, each of which sees itself alone."""
    alone = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril().bool()[None, None]
    batch = {"input_ids": IDS[:1], "attention_mask": alone, "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    (same,) = unpadded(batch, TEXT)
    assert same is batch


def test_encoder_and_decoder_are_cut_apart() -> None:
    batch = {
        "input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4],
        "decoder_attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]), "labels": IDS[:, :4],
    }  # fmt: skip
    first, second = shapes(batch, PAIR)
    assert first == {"input_ids": (1, 3), "attention_mask": (1, 3), "decoder_input_ids": (1, 2),
                     "decoder_attention_mask": (1, 2), "labels": (1, 2)}  # fmt: skip
    assert second["input_ids"] == second["labels"] == (1, 4)


def test_a_decoder_without_a_mask_ends_with_its_last_label() -> None:
    labels = torch.tensor([[5, -100, 6, -100], [5, 6, 7, 8]])
    first, second = shapes({"input_ids": IDS, "labels": labels, "decoder_input_ids": labels}, PAIR)
    assert first == {"input_ids": (1, 5), "labels": (1, 3), "decoder_input_ids": (1, 3)}
    assert second["labels"] == (1, 4)
    (same,) = unpadded({"input_ids": IDS, "labels": IDS.clone().fill_(-100)}, TEXT)
    assert same["input_ids"] is IDS, "labels of a language model say what is learned, not what is real"


@pytest.mark.parametrize("added", [False, True])
def test_torch_says_where_the_padding_is(added: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)

        def forward(self, src: Any, src_key_padding_mask: Any = None) -> Any:
            return self.encoder(src, src_key_padding_mask=src_key_padding_mask)

    model, src, padding = Model().eval(), torch.rand(2, 5, 8), MASK == 0
    mask = torch.zeros(2, 5).masked_fill(padding, -torch.inf) if added else padding
    whole = model(src, mask)
    for row, (x, cut) in enumerate(calibration_data(model, [(src, mask)]) or ()):
        torch.testing.assert_close(model(x, cut)[0], whole[row][MASK[row] == 1])
    assert row == 1


def test_images_are_cut_to_their_size() -> None:
    mask = torch.zeros(2, 6, 8, dtype=torch.long)
    mask[0, :4, :8] = mask[1, :6, :5] = 1
    found = shapes({"pixel_values": torch.rand(2, 3, 6, 8), "pixel_mask": mask})
    assert [part["pixel_values"] for part in found] == [(1, 3, 4, 8), (1, 3, 6, 5)]
    assert [part["pixel_mask"] for part in found] == [(1, 4, 8), (1, 6, 5)]


def test_samples_with_fewer_images_lose_the_empty_ones() -> None:
    mask = torch.ones(2, 2, 4, 4, dtype=torch.bool)
    mask[0, 1] = False
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "pixel_values": torch.rand(2, 2, 3, 4, 4),
             "pixel_attention_mask": mask}  # fmt: skip
    assert [part["pixel_values"] for part in shapes(batch)] == [(1, 1, 3, 4, 4), (1, 2, 3, 4, 4)]
    mask[0] = False
    assert shapes(batch)[0] == {"input_ids": (1, 5), "attention_mask": (1, 5)}


def test_features_that_are_not_as_long_as_the_mask_stay_whole() -> None:
    """Whisper reads all of its 30 seconds."""
    batch = {"input_features": torch.rand(2, 16, 5), "attention_mask": MASK, "decoder_input_ids": IDS}
    (same,) = unpadded(batch, PAIR)
    assert same is batch


IMAGE = 9


def with_images(counts: list[int], length: int = 6) -> dict[str, torch.Tensor]:
    """Texts that begin with so many placeholders, each as long as it must be and one more."""
    ids = torch.zeros(len(counts), length, dtype=torch.long)
    for row, count in enumerate(counts):
        ids[row, :count] = IMAGE
    mask = (torch.arange(length) <= torch.tensor(counts)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("counts", "images", "expected"),
    [([2, 4, 0], 3, [1, 2, 0]), ([4, 2], 2, [1, 1]), ([2, 3], 2, [1, 1])],
    ids=["none in one", "of two sizes", "uneven"],
)
def test_images_go_with_their_text(counts: list[int], images: int, expected: list[int]) -> None:
    pixels = torch.arange(images).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2).float()
    arguments = ModelArguments(placeholders={"image": IMAGE})
    parts = unpadded(with_images(counts) | {"pixel_values": pixels}, arguments)
    assert [
        len(part.get("pixel_values", ())) if part.get("pixel_values") is not None else 0 for part in parts
    ] == expected
    assert torch.equal(torch.cat([p["pixel_values"] for p in parts if p.get("pixel_values") is not None]), pixels)


def test_patches_go_with_their_image() -> None:
    """Qwen2-VL: patches of all images in a row, of which four are one token."""
    grid = torch.tensor([[1, 2, 2], [1, 4, 2], [1, 2, 2]])
    batch = with_images([1, 3]) | {"pixel_values": torch.arange(16)[:, None].float(), "image_grid_thw": grid}
    first, second = unpadded(batch, ModelArguments(placeholders={"image": IMAGE}))
    assert first["pixel_values"][:, 0].tolist() == [0, 1, 2, 3]
    assert first["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert second["pixel_values"][:, 0].tolist() == list(range(4, 16))


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "a gap": ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1, 1], [1] * 5])},
              "sample 0 has masked positions between real ones"),
    "another length": ({"input_ids": IDS[:, :3], "attention_mask": MASK}, r"\(2, 5\) and input_ids \(2, 3\)"),
    "no row for each": ({"input_ids": IDS, "attention_mask": MASK, "extra": torch.rand(3, 4)},
                        r"extra \(3, 4\) has no row for each of its 2"),
    "images of nobody": (with_images([3, 4]) | {"pixel_values": torch.rand(5, 3, 2, 2)}, "placeholders, for 5"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_taken_apart_is_refused(batch: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        unpadded(batch, ModelArguments(placeholders={"image": IMAGE}))


def test_a_gap_is_cut_where_positions_are_given() -> None:
    mask, places = torch.tensor([[1, 0, 1, 1, 1]]), torch.arange(5)[None]
    (part,) = unpadded({"input_ids": IDS[:1], "attention_mask": mask, "position_ids": places}, TEXT)
    assert part["input_ids"].tolist() == [[1, 3, 4, 5]]
    assert part["position_ids"].tolist() == [[0, 2, 3, 4]]


@pytest.mark.parametrize("picture", [4, 2])
def test_positions_of_text_and_picture_together_are_cut_with_the_text(picture: int) -> None:
    """As Krea 2 has them: one list for all samples, of which the text is the beginning."""
    batch = {
        "hidden_states": torch.ones(2, picture, 8),
        "encoder_hidden_states": torch.ones(2, 5, 3, 6),
        "position_ids": torch.arange(5 + picture)[:, None].expand(-1, 3),
        "encoder_attention_mask": MASK.bool(),
    }
    found = unpadded(batch, TEXT)
    places = [part["position_ids"][:, 0].tolist() for part in found]
    after = [*range(5, 5 + picture)]
    assert places == [[0, 1, 2, *after], [1, 2, 3, 4, *after]]
    assert [part["encoder_hidden_states"].shape[1] for part in found] == [3, 4]
    assert [tuple(part["hidden_states"].shape) for part in found] == [(1, picture, 8)] * 2


def test_errors_name_the_batch_and_nothing_left_is_one() -> None:
    model, nothing = nn.Linear(1, 1), {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    with pytest.raises(CalibrationError, match="batch 1: attention_mask: sample 0 has masked positions"):
        list(calibration_data(model, [{"input_ids": IDS}, REFUSED["a gap"][0]]) or ())
    with pytest.raises(CalibrationError, match="All positions of all 1 calibration batches are masked"):
        list(calibration_data(model, [nothing]) or ())


def test_samples_are_counted_when_they_are_known() -> None:
    batches: Any = calibration_data(nn.Linear(1, 1), [{"input_ids": IDS, "attention_mask": MASK}])
    assert len(batches) == 1
    assert len(list(batches)) == len(batches) == 2


def test_masks_on_a_device_are_read_once_for_a_list_of_batches() -> None:
    with PretendedGpu() as gpu:
        ones = [{"input_ids": IDS.to("cuda"), "attention_mask": torch.ones_like(IDS).to("cuda")} for _ in range(9)]
        gpu.meter.reset()
        assert [one is batch for one, batch in zip(calibration_data(nn.Linear(1, 1), ones) or (), ones, strict=True)]
        assert gpu.meter.waits.total() == 1
        masked = [{"input_ids": IDS.to("cuda"), "attention_mask": MASK.to("cuda")}, *ones]
        found = list(calibration_data(nn.Linear(1, 1), masked) or ())
        assert [tuple(x["input_ids"].shape) for x in found] == [(1, 3), (1, 4), *[(2, 5)] * 9]
        assert found[0]["input_ids"].device == torch.device("cuda:0")


def test_a_model_of_one_length_says_what_is_possible() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.up = nn.Embedding(16, 8), nn.Parameter(torch.rand(5, 8)), nn.Linear(8, 8)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.up(self.words(input_ids) + self.places)

    config = LLMTemplate.get("auto").get_config("int8", exclude_layers=[])
    with pytest.raises(CalibrationError, match=r"batch 0, dict \(input_ids: int64 \(1, 3\).* masks of ones"):
        ModelQuantizer(config).quantize_model(Model(), [{"input_ids": IDS, "attention_mask": MASK}])
    ModelQuantizer(config).quantize_model(Model(), [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}])
