"""Logits of llama.cpp: `python llama_cpp.py IDS OUT FILE...`, in an environment with cyllama (llama.cpp, compiled).

IDS is a file of numpy with the tokens, OUT the folder for (tokens, vocabulary) float32 of each FILE, under its name
with .npy; where it did not load, a .txt with what llama.cpp says. llama.cpp ends the process for some files: then
there is neither.
"""

import sys
from pathlib import Path

import cyllama.llama.llama_cpp as llama
import numpy as np


class Model(llama.LlamaModel):
    """With the attribute that the package's own context asks for."""

    @property
    def n_vocab(self):
        return self.get_vocab().n_vocab


def logits(file, ids):
    options = llama.LlamaModelParams()
    options.n_gpu_layers = 0
    context = llama.LlamaContextParams()
    context.n_ctx = context.n_batch = context.n_ubatch = 64
    context.n_threads = context.n_threads_batch = 1
    context.type_k = context.type_v = 0  # float32
    context.flash_attn_type = 0
    run = llama.LlamaContext(Model(file, options), context)
    batch = llama.LlamaBatch(n_tokens=64, embd=0, n_seq_max=1)
    batch.set_batch(ids, 0, True)
    run.decode(batch)
    return np.stack([np.asarray(run.get_logits_ith(i), dtype=np.float32) for i in range(len(ids))])


if __name__ == "__main__":
    said = []
    llama.set_log_callback(lambda level, text: said.append(text))
    llama.llama_backend_init()
    ids, out = np.load(sys.argv[1]).tolist(), Path(sys.argv[2])
    for name in map(Path, sys.argv[3:]):
        said.clear()
        try:
            np.save(out / f"{name.name}.npy", logits(str(name), ids))
        except Exception as error:  # noqa: BLE001
            said += [f"{error}\n"]
            errors = [line for line in "".join(said).splitlines() if "error" in line.lower()]
            (out / f"{name.name}.txt").write_text("\n".join(errors) or str(error))
