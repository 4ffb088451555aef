"""The search of the built site, as a browser runs it: python -m tests.site_search build/site.

It needs `node`. The worker that the site gives to browsers is run on the index of the site, so settings, weights and
separators are those of mkdocs.yml.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

LOOKED_FOR = {
    # Running it, and what one needs to know before.
    "install": "index", "windows": "faq", "offline": "guide/promises", "security": "guide/promises",
    "reproducible": "guide/recipes", "resume": "howto/long_jobs", "interrupted": "howto/long_jobs",
    "logging": "howto/long_jobs", "log file": "howto/long_jobs", "environment variables": "howto/long_jobs",
    "progress": "howto/long_jobs", "jupyter notebook": "howto/notebooks",
    # Which model, on which machine.
    "Llama 70B": "choose/families", "qwen": "choose/families", "mixture of experts": "choose/families",
    "moe": "choose/families", "gemma": "choose/families", "whisper": "choose/families",
    "out of memory": "guide/large_models", "OOM": "guide/large_models", "GPU memory": "guide/large_models",
    "multi gpu": "guide/large_models", "torchrun": "guide/large_models", "stable diffusion": "guide/diffusers",
    "flux": "guide/diffusers", "comfyui": "guide/comfyui", "sentence transformers": "howto/tasks",
    # Where it runs.
    "vllm": "howto/vllm", "sglang": "howto/vllm", "tensor parallel": "howto/vllm", "ollama": "howto/llama_cpp",
    "lm studio": "howto/llama_cpp", "gguf": "howto/llama_cpp", "NPU": "howto/npu", "ryzen ai": "howto/npu",
    "openvino": "howto/openvino", "hugging face hub": "guide/report", "onnx": "guide/onnx",
    # How many bits.
    "int4": "choose/scheme", "int8": "choose/scheme", "fp8": "choose/scheme", "nvfp4": "choose/scheme",
    "w4a16": "choose/scheme", "group size": "choose/scheme", "mixed precision": "guide/bit_budget",
    "KV cache": "guide/kv_cache", "exclude layers": "guide/pytorch", "recommended settings": "choose/settings",
    "gptq": "guide/gptq", "awq": "guide/awq", "smoothquant": "guide/smoothquant", "imatrix": "guide/export_gguf",
    # Data.
    "calibration samples": "guide/data", "bos": "guide/data", "chat template": "guide/data",
    "images preprocessing": "howto/images", "imagenet": "howto/images", "resnet": "howto/images",
    "yolo": "howto/images", "normalize mean std": "howto/images",
    # Is it good, and what to do.
    "perplexity": "reference/verdict", "is it good enough": "reference/verdict", "lm-eval": "howto/tasks",
    "mmlu": "howto/tasks", "benchmark": "howto/tasks", "accuracy drop": "howto/lost_too_much",
    "gibberish": "howto/lost_too_much", "slow": "faq",
    # Parts and training of one's own.
    "own observer": "guide/own_parts", "custom observer": "guide/own_parts", "own scheme": "guide/own_parts",
    "custom dtype": "guide/own_parts", "qat training loop": "guide/qat", "fine-tuning": "guide/qat",
    "lora": "guide/loaded", "torch compile": "guide/loaded",
}  # fmt: skip
"""Words that people type -> the page that they look for."""

_IN_NODE = """
    const fs = require("fs"), [worker, index, words] = process.argv.slice(1)
    let handle, reply
    globalThis.self = globalThis
    globalThis.addEventListener = (_, handler) => { handle = handler }
    globalThis.postMessage = (message) => { reply = message.data }
    require("vm").runInThisContext(fs.readFileSync(worker, "utf8"))
    const ask = async (type, data) => { await handle({data: {type, data}}); return reply }
    const answer = async () => {
        await ask(0, {...JSON.parse(fs.readFileSync(index, "utf8")), options: {suggest: true}})
        const first = {}
        for (const typed of JSON.parse(words)) {
            const [found] = (await ask(2, typed)).items
            first[typed] = found ? found[0].location : ""
        }
        console.log(JSON.stringify(first))
    }
    answer()
"""


def first_pages(site: Path) -> dict[str, str]:
    """The page that the search of a site shows first, for each entry of LOOKED_FOR; "" where it finds nothing."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    index, words = site / "search" / "search_index.json", json.dumps(list(LOOKED_FOR))
    command = ["node", "-e", _IN_NODE, str(worker), str(index), words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    return {typed: place.partition(".html")[0] for typed, place in json.loads(done.stdout).items()}


def main(site: Path) -> int:
    if shutil.which("node") is None:
        print("The search was not tried: node is not installed.")
        return 0
    found = first_pages(site)
    wrong = {typed: page for typed, page in found.items() if page != LOOKED_FOR[typed]}
    for typed, page in wrong.items():
        print(f"The search for {typed!r} shows {page or 'nothing'} first, and not {LOOKED_FOR[typed]}.")
    print(f"{len(found) - len(wrong)} of {len(found)} searches show the right page first.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
