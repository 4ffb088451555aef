"""Names of tensors in checkpoints, against what transformers itself writes and reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from quark.torch.model.names import dropped_names


@pytest.mark.slow
def test_what_a_part_leaves_out_and_another_part_holds_is_not_dropped(tmp_path: Path) -> None:
    """The text model of Tipsv2 leaves out `vision_encoder`, the vision model `text_encoder`, the names in its files."""
    from transformers import Tipsv2Model, Tipsv2VisionModel

    from benchmarks.architectures.__main__ import build

    model, _ = build("tipsv2", "Tipsv2Model")
    model.save_pretrained(tmp_path)
    stored = [*load_file(tmp_path / "model.safetensors"), "text_encoder.new"]
    assert isinstance(model, Tipsv2Model)
    assert dropped_names(model, stored) == ["text_encoder.new"]
    vision = Tipsv2VisionModel.from_pretrained(tmp_path)
    texts = [name for name in stored if name.startswith("text_encoder")]
    assert dropped_names(vision, stored) == texts and len(texts) > 20
