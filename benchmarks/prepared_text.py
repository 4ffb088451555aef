"""Text as quark prepares it, beside what others make of it.

    python -m benchmarks.prepared_text tokenizers FOLDER...
    python -m benchmarks.prepared_text perplexity FOLDER FILE.gguf TEXT [WINDOWS]

`tokenizers` prints for each folder whether documents, windows and conversations have the ids of the tokenizer's own
call and of `apply_chat_template`. `perplexity` runs a GGUF file in llama.cpp on the windows of a text that quark cuts,
and prints the perplexity of both; it needs the `cyllama` package, which holds llama.cpp compiled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gguf_tokenizers import TEXTS
from quark.goals.efforts import HELD_OUT_TEXT
from quark.torch.llm.documents import Document
from quark.torch.llm.text import negative_log_likelihood, perplexity, token_windows

LENGTH = 512
CHATS: dict[str, list[dict[str, str]]] = {
    "question": [{"role": "user", "content": "Which module reads JSON?"}],
    "answered": [{"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Hello. How can I help?"}],
    "turns": [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))],
}


def different(tokenizer: Any) -> Iterator[str]:
    """A line for what has not the ids of the tokenizer's own call."""
    for text in TEXTS:
        if Document(text, "").token_ids(tokenizer) != tokenizer(text)["input_ids"]:
            yield f"    document {text[:30]!r}"
    text = HELD_OUT_TEXT.read_text(encoding="utf-8")
    own, plain = (tokenizer(text, add_special_tokens=flag, verbose=False)["input_ids"] for flag in (True, False))
    begin = next((own[:i] for i in range(len(own) - len(plain) + 1) if own[i : i + len(plain)] == plain), [])
    with TemporaryDirectory() as folder:
        (file := Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        windows = [window[0].tolist() for window in token_windows(tokenizer, file, LENGTH)]
    if windows[0] != own[:LENGTH]:
        yield f"    the first window begins with {windows[0][:4]}, the text with {own[:4]}"
    if any(window[: len(begin)] != begin for window in windows):
        yield f"    a window does not begin with {begin}"
    read = [token for window in windows for token in window[len(begin) :]]
    if read != plain[: len(read)]:
        yield "    the windows are not the text"
    for name, messages in CHATS.items() if tokenizer.chat_template else ():
        wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        if Document(messages, "").token_ids(tokenizer) != wanted:
            yield f"    conversation {name!r}"


def tokenizers(folders: list[str]) -> None:
    """Print a line for each folder."""
    equal = 0
    for folder in map(Path, folders):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        lines = list(different(tokenizer))
        equal += not lines
        begin = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
        what = f"{begin[1]} -> {begin[0]}{', chat template' if tokenizer.chat_template else ''}"
        print(f"{folder.name}: {what}: {'differs' if lines else 'equal'}", *lines, sep="\n", flush=True)
    print(f"{equal} of {len(folders)}")


def of_llama_cpp(file: str, windows: list[torch.Tensor]) -> float:
    """The perplexity of llama.cpp over windows, each of which begins with an empty cache."""
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
        """With the size of its vocabulary, which contexts of cyllama 0.2.18 ask for and its models do not have."""

        @property
        def n_vocab(self) -> int:
            return int(self.get_vocab().n_vocab)

    llama_cpp.disable_logging()
    model = Model(file, llama_cpp.LlamaModelParams())
    params = llama_cpp.LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = LENGTH
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.LlamaContext(model, params)
    total, count = 0.0, 0
    for window in windows:
        context.kv_cache_clear()
        batch = llama_cpp.LlamaBatch(n_tokens=LENGTH, embd=0, n_seq_max=1)
        batch.set_batch(window[0].tolist(), 0, True)
        context.decode(batch)
        logits = torch.tensor([context.get_logits_ith(i) for i in range(LENGTH)])
        total += negative_log_likelihood(logits[None], window)
        count += LENGTH - 1
    return math.exp(total / count)


def compare_perplexity(folder: str, file: str, text: str, limit: str = "4") -> None:
    """Print the perplexity of both on the same windows, and whether llama.cpp reads the same tokens of the text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = token_windows(tokenizer, Path(text), LENGTH, int(limit))
    model = AutoModelForCausalLM.from_pretrained(Path(file).parent, gguf_file=Path(file).name, dtype=torch.float32)
    ours = perplexity(model.eval(), windows)
    theirs = of_llama_cpp(file, windows)
    print(
        f"{len(windows)} windows of {LENGTH} tokens: here {ours:.4f}, llama.cpp {theirs:.4f} ({theirs / ours - 1:+.3%})"
    )


if __name__ == "__main__":
    {"tokenizers": lambda *folders: tokenizers([*folders]), "perplexity": compare_perplexity}[sys.argv[1]](
        *sys.argv[2:]
    )
