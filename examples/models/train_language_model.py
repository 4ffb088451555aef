"""Train the small language model of the demos and tests.

The text is the prose of the running Python's own standard library: the help topics of ``pydoc``, and the
docstrings and comments of its modules. The script splits it by document, trains a byte-level BPE tokenizer
and a Llama model from scratch on the CPU, and writes ``language_model/`` and ``text/`` beside itself.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import re
import runpy
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CONTEXT = 256
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "encodings", "lib2to3", "pydoc_data"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OTHER_LICENCE = re.compile("(?i)permission (to use|is hereby)|spdx|(apache|general public|bsd) licen")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text that read as prose, each unwrapped to one line."""
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(re.sub(r"([-=*#~_.+])\1{3,}", " ", block).split())
        prose = sum(character.isalpha() or character == " " for character in line)
        if len(line) >= 30 and prose >= 0.85 * len(line) and ">>>" not in line and line.isascii():
            yield line


def module_text(source: str) -> str:
    """Collect the docstrings and the comment blocks of a module, in the order of their lines."""
    pieces: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            pieces.append((node.body[0].lineno, docstring))
    for match in re.finditer(r"(?:^[ \t]*#.*\n)+", source, re.MULTILINE):
        comment = re.sub(r"^[ \t]*#+[ \t]?", "", match.group(), flags=re.MULTILINE)
        pieces.append((source.count("\n", 0, match.start()) + 1, comment))
    return "\n\n".join(text for _, text in sorted(pieces))


def collect_documents() -> list[list[str]]:
    """Return the documents of the standard library, each a list of paragraphs, without repetitions.

    A hash of their names orders them. Modules that name a licence of their own are left out, and paragraphs
    with half of their runs of eight words seen before are dropped: no text of one split returns in another.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = runpy.run_path(str(library / "pydoc_data" / "topics.py"))["topics"]
    texts: dict[str, str] = {f"topic {name}": topic for name, topic in topics.items()}
    for path in library.rglob("*.py"):
        place = path.relative_to(library)
        if not SKIPPED_FOLDERS.intersection(place.parts) and not path.name.startswith("_sysconfigdata"):
            source = path.read_text(encoding="utf-8", errors="replace")
            if not OTHER_LICENCE.search(source):
                texts[place.as_posix()] = module_text(source)
    seen: set[tuple[str, ...]] = set()
    documents = []
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        kept = []
        for line in paragraphs(texts[name]):
            words = re.findall(r"[a-z]+", line.lower())
            runs = {tuple(words[start : start + 8]) for start in range(max(1, len(words) - 7))}
            if len(runs & seen) < 0.5 * len(runs):
                kept.append(line)
            seen |= runs
        documents.append(kept)
    return [lines for lines in documents if lines]


def split_documents(documents: list[list[str]], size: int = 150_000) -> dict[str, list[str]]:
    """Split the documents into ``heldout`` and ``calibration`` (``size`` characters each) and ``train``."""
    splits: dict[str, list[str]] = {"heldout": [], "calibration": [], "train": []}
    for lines in documents:
        text = "\n".join(lines) + "\n"
        fits = (name for name in splits if sum(map(len, splits[name])) + len(text) <= size)
        splits["train" if len(text) > size // 8 else next(fits, "train")].append(text)
    return splits


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of 2048 tokens that starts every text with the BOS token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A {BOS} $B", [bos])
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return the texts as one row of tokens, each text between BOS and EOS."""
    rows = [[*tokenizer.encode(text, verbose=False), tokenizer.eos_token_id] for text in texts]
    return torch.tensor([token for row in rows for token in row])


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained model, whose linear layers all have a multiple of 128 inputs."""
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return LlamaForCausalLM(LlamaConfig.from_dict({"vocab_size": len(tokenizer)} | sizes | heads | tokens))


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the perplexity per token over windows of ``CONTEXT`` tokens."""
    total, count = 0.0, 0
    for window in tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT).split(16):
        logits = model(window).logits[:, :-1].flatten(0, 1)
        total += functional.cross_entropy(logits, window[:, 1:].flatten(), reduction="sum").item()
        count += window[:, 1:].numel()
    return math.exp(total / count)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> LlamaForCausalLM:
    """Write the model in float16, replacing each file atomically, and return it as loaded back in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    with TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
        rounded.half().save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        settings = Path(temporary) / "tokenizer_config.json"
        content = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(content, indent=2) + "\n")
        for path in Path(temporary).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    """Build the corpus, train the tokenizer and the model, and save them."""
    parser = argparse.ArgumentParser(description="Train the small language model of the demos and tests.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=16, help=f"windows of {CONTEXT} tokens per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16 (can be faster)")
    options = parser.parse_args()
    torch.manual_seed(0)
    disable_progress_bar()

    (options.output / "text").mkdir(parents=True, exist_ok=True)
    splits = split_documents(collect_documents())
    tokenizer = train_tokenizer(splits["train"])
    tokens = {name: tokenize(tokenizer, texts) for name, texts in splits.items()}
    for name, texts in splits.items():
        print(f"{name}: {len(texts)} documents, {sum(map(len, texts))} bytes, {len(tokens[name])} tokens")
        if name != "train":
            (options.output / "text" / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    counts = torch.bincount(tokens["train"], minlength=len(tokenizer)) + 1.0
    unigram = (counts / counts.sum()).log()[tokens["heldout"]].mean().neg().exp().item()
    model = build_model(tokenizer)
    print(f"{model.num_parameters()} parameters, unigram perplexity {unigram:.1f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.3)
    schedule = OneCycleLR(optimizer, options.rate, options.steps, pct_start=0.05, cycle_momentum=False)
    start = time.monotonic()
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(tokens["train"]) - CONTEXT, (options.batch, 1))
        window = tokens["train"][starts + torch.arange(CONTEXT)]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
            logits = model(window).logits[:, :-1].flatten(0, 1).float()
        loss = functional.cross_entropy(logits, window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f} {time.monotonic() - start:.0f} s", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            saved = save(model, tokenizer, options.output / "language_model")
            print(f"held-out perplexity {perplexity(saved, tokens['heldout']):.2f}", flush=True)


if __name__ == "__main__":
    main()
