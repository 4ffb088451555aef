"""A class of transformers that is loaded lightly is the same: tensors, ties, and the plan of every family."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.families import GPT2, MOE, SIZES

FAMILIES = ["llama", "gemma3_text", "qwen3_5_text", "mamba", "falcon", "opt", "bart", *MOE, "gpt2"]

CODE = """
import sys
from contextlib import nullcontext
from pathlib import Path
from quark.base.loading import is_put_off, lightly, own_process
own_process()
with lightly() if sys.argv[1] == "lightly" else nullcontext():
    from quark.jobs.configure_folder import plan_of
    from quark.jobs.folders.models import load_meta_model
    from quark.torch import LLMTemplate
    import transformers
    assert is_put_off(transformers) == (sys.argv[1] == "lightly")
    for folder in sorted(Path(sys.argv[2]).iterdir()):
        model = load_meta_model(folder)
        names = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        print(folder.name, type(model).__module__, type(model).__name__, [v for v in names.values() if len(v) > 1])
        print([(name, type(module).__name__) for name, module in model.named_modules()])
        print([(name, tuple(x.shape), x.dtype) for name, x in model.state_dict().items()])
        plan = plan_of(model, LLMTemplate.get("llama").get_config("int8_wo"), "quark")
        print(plan.before, plan.after, plan.layers.layers, plan.layers.excluded, plan.layers.to_exclude)
"""


def said(how: str, folders: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, how, str(folders)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_skeleton_and_the_plan_of_each_family_are_the_same(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in FAMILIES:
        sizes = GPT2 if name == "gpt2" else {**SIZES, **MOE.get(name, {})}
        config = AutoConfig.for_model(name, **sizes)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
        config.save_pretrained(tmp_path / name)
    lightly = said("lightly", tmp_path)
    assert lightly.count("\n") == 4 * len(FAMILIES) and lightly == said("plainly", tmp_path)
