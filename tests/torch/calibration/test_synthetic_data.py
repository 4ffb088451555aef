"""What a model writes itself: from its own distribution, from tokens of the data, and the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quark.errors import CalibrationError, NotSupportedError
from quark.torch.calibration.synthetic_data import PROMPT, synthetic_batches
from tests.models.torch_zoo import tiny_llama, token_batches


def test_texts_are_as_long_as_the_data_begin_with_its_tokens_and_follow_the_seed() -> None:
    model, data = tiny_llama(bos_token_id=None), token_batches(3, length=12)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    written = synthetic_batches(model, data, 5)
    assert torch.equal(torch.get_rng_state(), state), "what the user draws afterwards"
    assert [tuple(text.shape) for text in written] == [(1, 12)] * 5
    rows = [row for batch in data for row in batch]
    for index, text in enumerate(written):
        row = rows[index % len(rows)]
        windows = row.unfold(0, PROMPT, 1).tolist()
        assert text[0, :PROMPT].tolist() in windows
    assert torch.equal(torch.cat(written), torch.cat(synthetic_batches(model, data, 5)))
    assert not torch.equal(torch.cat(written), torch.cat(synthetic_batches(model, data, 5, seed=1)))


def test_a_text_that_is_opened_stays_opened_and_padding_is_no_prompt() -> None:
    model = tiny_llama(bos_token_id=1, pad_token_id=0)
    ids = torch.tensor([[0, 0, 1, 9, 8, 7, 6, 5]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    for written in synthetic_batches(model, [batch], 6):
        assert set(written) == {"input_ids", "attention_mask"}
        assert bool(written["attention_mask"].all())
        prompt = written["input_ids"][0, :PROMPT].tolist()
        assert prompt[0] == 1
        assert prompt[1:] in ([9, 8, 7], [8, 7, 6], [7, 6, 5])


def test_tokens_come_from_the_whole_distribution_whatever_the_model_prefers_to_write() -> None:
    """A head that is sharp, and a generation config that would take its most probable token alone."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.generation_config.top_k, model.generation_config.do_sample = 1, False
    row = torch.arange(1, PROMPT + 2)[None]
    texts = torch.cat(synthetic_batches(model, [row], 512))
    with torch.no_grad():
        expected = torch.zeros(64)
        for prompt in texts[:, :PROMPT].unique(dim=0):
            share = (texts[:, :PROMPT] == prompt).all(1).float().mean()
            expected += share * model(prompt[None]).logits[0, -1].softmax(-1)
    found = torch.bincount(texts[:, PROMPT], minlength=64) / 512
    end = model.generation_config.eos_token_id
    if isinstance(end, int):
        expected[end] = 0
    expected /= expected.sum()
    # Five standard deviations of each share.
    assert bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / 512).sqrt() + 1e-3).all())


def test_what_cannot_write_or_begin_is_refused() -> None:
    from transformers import BertConfig, BertModel

    encoder: Any = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20))
    with pytest.raises(NotSupportedError, match="BertModel does not go on writing"):
        synthetic_batches(encoder, token_batches(1), 1)
    with pytest.raises(NotSupportedError, match="Linear does not go on writing"):
        synthetic_batches(torch.nn.Linear(2, 2), token_batches(1), 1)
    with pytest.raises(CalibrationError, match="each batch a tensor"):
        synthetic_batches(tiny_llama(), [torch.randn(2, 8)], 1)
    with pytest.raises(CalibrationError, match=f"no sample has more than {PROMPT} tokens"):
        synthetic_batches(tiny_llama(), [torch.ones(1, PROMPT, dtype=torch.long)], 1)
