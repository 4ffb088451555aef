"""Tokens of llama.cpp, from our GGUF files, beside those of transformers.

    python -m benchmarks.gguf_tokenizers FOLDER...

Needs the `cyllama` package, which holds llama.cpp compiled. Prints for each folder how many of the texts have equal
tokens, and the first other tokens of each text that has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from transformers import AutoTokenizer

from quark.errors import QuarkError
from quark.gguf.tokenizer import write_tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's naïve, isn't it? I'LL go; WE'VE won.",
    "a b  c   d    e     f      g\t\th \t i",
    " leading",
    "  two leading",
    "trailing  ",
    "a\nb\n\nc\n\n\n  d\r\ne\n \n f\n",
    "   ",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2nd ¼ ² ٣٤٥ ½",
    "日本語のテキスト、東京。中文文本，你好！한국어 문장입니다. ㄱㄴ",  # noqa: RUF001
    "😀 🎉👩‍👩‍👧‍👦 🇩🇪 ✨x",
    "Ça été naïve Ünïcödé ÀÉÎ ñandú façade CAFÉ",
    "e\u0301te\u0301 n\u0303",
    "Привет мир! Это ТЕКСТ. приветМир",  # noqa: RUF001
    "नमस्ते दुनिया हिन्दी में",
    "สวัสดีครับ ภาษาไทย",
    "مرحبا بالعالم، كيف الحال؟",
    "def f(x):\n    return {'a': x[0]**2, \"b\": [1,2]}  # note\n\tif (a != b && c <= d) { x->y++; }\n",
    "...!!! ??? ### $$$ --- ___ ~~~ (a)[b]{c} <d> \"e\" 'f' a/b\\c @user #tag 50% a&b",
    "camelCaseHTTPServer XMLParser iPhone",
    "<s>hello</s> world <unk> <|endoftext|>x<|im_start|>user\nhi [CLS] a [MASK] b [SEP]",
    "a<tool>b <tool> c",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g ﬁ ﷺ Å ｶﾞ ㎏ İ",
    " ".join(" " * n + "x" for n in range(1, 34)),
    "supercalifragilisticexpialidocious" * 3,
    "aaaaaaaaaaaaa bbbbbbbbb ========== ---------- zzzz",
    "\n\n\n\n\n\n\n\n",
    "a b",
)
WIDTH = 32
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write_empty_model(folder: Path, file: Path, rows: int) -> None:
    """A model of zeros, as llama.cpp loads no tokenizer alone."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (("context_length", 64), ("embedding_length", WIDTH), ("block_count", 1), ("vocab_size", rows)):
        getattr(writer, f"add_{name}")(value)
    for name, value in (("feed_forward_length", WIDTH), ("head_count", 2), ("head_count_kv", 2)):
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 2)
    write_tokenizer(writer, folder, rows)
    writer.add_tensor("token_embd.weight", np.zeros((rows, WIDTH), np.float16))
    for name in MATRICES:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def different(tokenizer: Any, vocabulary: Any) -> Iterator[str]:
    """A line for each text whose tokens are not equal."""
    for text in TEXTS:
        ours, theirs = tokenizer(text)["input_ids"], list(vocabulary.tokenize(text, True, True))
        if ours != theirs:
            first = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            here, there = (tokenizer.convert_ids_to_tokens(ids[first : first + 5]) for ids in (ours, theirs))
            yield f"    {text[:30]!r}: transformers {here}, llama.cpp {there}"


def main(folders: list[str]) -> None:
    from cyllama.llama import llama_cpp

    llama_cpp.disable_logging()
    for folder in map(Path, folders):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        with TemporaryDirectory() as place:
            file = Path(place) / "tokenizer.gguf"
            try:
                write_empty_model(folder, file, max(tokenizer.get_vocab().values()) + 1)
            except QuarkError as error:
                print(f"{folder.name}: refused: {error}")
                continue
            model = llama_cpp.LlamaModel(str(file), llama_cpp.LlamaModelParams())
            lines = list(different(tokenizer, model.get_vocab()))
        print(f"{folder.name}: {len(TEXTS) - len(lines)} of {len(TEXTS)}", *lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
