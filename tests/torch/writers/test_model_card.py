"""Model cards: front matter as huggingface's own reader reads it, lines that load the model, no README lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from safetensors.torch import load_file, save_file

from quark import convert
from quark.errors import ConfigError, FormatError
from quark.goals import GOALS, GoalRequest, choose
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.config.llm_template import cache_spec
from quark.torch.formats import FORMATS
from quark.torch.model.folder_files import has_tokenizer
from quark.torch.writers.model_card import Figures, add_figures, base_model
from tests.commands.program import quark
from tests.models.model_folders import model_folder
from tests.models.torch_zoo import tiny_llama, token_batches

SOURCE = (
    "---\nlicense: apache-2.0\nlanguage: en\nbase_model: someone/else\ntags: [theirs, quark]\n"
    "pipeline_tag: text-generation\nmodel-index: [{name: float, results: []}]\n---\n# Theirs\n"
)
PROGRAM = {"vllm": "vllm", "sglang": "python"}
"""Goal -> the word that its command begins with."""
PROGRAMS = [name for name, goal in GOALS.items() if goal.folder is not None and not goal.networks]


def exported(
    source: Path, out: Path, readme: str | None = None, custom_mode: str = "quark", scheme: str = "int4_wo_32",
    exclude: tuple[str, ...] = ("lm_head",), **options: Any,
) -> Path:  # fmt: skip
    model = tiny_llama()
    model.save_pretrained(source)
    if readme is not None:
        (source / "README.md").write_text(readme)
    model.config._name_or_path = str(source)
    cache = options.pop("cache", None)
    config = LLMTemplate.get("llama").get_config(scheme, kv_cache_scheme=cache, exclude_layers=list(exclude))
    quantizer = ModelQuantizer(config)
    made = quantizer.quantize_model(model, token_batches(1) if cache else None)
    return export_safetensors(quantizer.freeze(made), out, custom_mode, **options)


def commands(folder: Path) -> list[str]:
    """The commands of a card that run its folder."""
    return re.findall(r"```sh\n(.*)\n```", (folder / "README.md").read_text())


@pytest.mark.slow
def test_hubs_read_what_the_model_is(tmp_path: Path) -> None:
    out = exported(tmp_path / "tiny-llama", tmp_path / "out", SOURCE)
    card = ModelCard.load(out / "README.md")
    found = card.data.to_dict()
    assert found == {
        "license": "apache-2.0", "language": "en", "library_name": "transformers", "base_model": "tiny-llama",
        "base_model_relation": "quantized", "tags": ["theirs", "quark", "quantized", "llama"],
        "pipeline_tag": "text-generation",
    }  # fmt: skip
    assert card.data.eval_results is None, "the float model's are not its own, and nothing was measured"
    weights = (out / "model.safetensors").stat().st_size
    assert f"{weights / 1e6:.2f} MB" in card.text and "int4 group 32" in card.text
    assert (out / "README_base.md").read_text() == SOURCE and (
        tmp_path / "tiny-llama" / "README.md"
    ).read_text() == SOURCE


@pytest.mark.slow
def test_the_lines_that_load_the_model_load_it(tmp_path: Path) -> None:
    out = exported(tmp_path / "tiny-llama", tmp_path / "out")
    text = (out / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, object] = {}
    exec(code[0].replace("FOLDER", str(out)), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module) and "README_base.md" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "readme",
    [
        "---\n{[\n---\n",
        "---\n- a\n---\n",
        "no front matter",
        "",
        "---\nlicense: [1\n",
        "---\nlicense: &a [x, *a]\n---\n",
    ],
)
def test_a_damaged_readme_costs_no_model(readme: str, tmp_path: Path) -> None:
    out = exported(tmp_path / "source", tmp_path / "out", readme, "awq")
    found = metadata_load(out / "README.md")
    assert found is not None and "license" not in found and found["tags"] == ["quark", "quantized", "awq", "llama"]
    assert (out / "README_base.md").read_text() == readme


def test_the_base_model_is_called_as_the_hub_calls_it(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--tiny.llama-1b" / "snapshots" / "0123"
    cached.mkdir(parents=True)
    hostile = tmp_path / "a: [b]\n---"
    hostile.mkdir()
    assert base_model(cached) == "org/tiny.llama-1b"
    assert base_model(tmp_path / "llama") == "llama"
    assert base_model(hostile) is None and base_model(None) is None
    for name, part in (("model_index.json", "transformer"), ("modules.json", "0_Transformer")):
        whole = tmp_path / f"whole-{part}"
        (whole / part).mkdir(parents=True)
        (whole / name).touch()
        assert base_model(whole / part) == base_model(whole) == whole.name


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_card_has_the_command_that_the_terminal_prints(name: str, tmp_path: Path) -> None:
    """Of each program that reads folders, with and without a quantized cache."""
    for cache in {None, *GOALS[name].cache[:1]}:
        forms = {form for form, row in FORMATS.items() if cache is not None and row.holds_cache(cache_spec(cache))}
        choice = choose(GoalRequest(goal=name, cache=cache, cache_forms=forms or None))
        if choice.form not in FORMATS:
            return
        out = exported(
            tmp_path / "source", tmp_path / f"out-{cache}", None, choice.form, choice.scheme,
            cache=cache, reader=choice.goal.reader, goal=name,
        )  # fmt: skip
        first, *others = commands(out)
        assert first == choice.command("FOLDER", tokenizer=False), "the source has none"
        assert not others or choice.goal.reader == "transformers"
        assert ("TOKENIZER stands for" in (out / "README.md").read_text()) == any(
            "TOKENIZER" in c for c in [first, *others]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "scheme", "options", "served"),
    [
        ("compressed-tensors", "int4_wo_32", {}, "vllm serve FOLDER --tokenizer TOKENIZER"),
        ("quark", "int3_wo_128", {}, None),
        ("quark", "ptpc_fp8", {"exclude": ("lm_head", "*.0.self_attn.q_proj")}, None),
        ("quark", "ptpc_fp8", {"weight_format": "fake_quantized"}, None),
        ("quark", "ptpc_fp8", {"cache": "int8"}, None),
        ("quark", "ptpc_fp8", {"cache": "fp8"}, "vllm serve FOLDER --kv-cache-dtype fp8 --tokenizer TOKENIZER"),
    ],
    ids=["served", "untried", "a part in float", "float values", "a cache that is not read", "a cache"],
)
def test_a_folder_for_no_program_names_the_servers_that_are_known_to_load_it(
    form: str, scheme: str, options: dict[str, Any], served: str | None, tmp_path: Path
) -> None:
    found = commands(exported(tmp_path / "source", tmp_path / "out", None, form, scheme, **options))
    loaded = [name for name in ("vllm", "sglang") if (form, scheme) in pairs(name)]
    assert [line.split()[0] for line in found] == [PROGRAM[name] for name in loaded if served is not None]
    assert served in (None, *found)


@pytest.mark.slow
def test_every_flow_writes_the_card_and_the_command_that_is_printed(tmp_path: Path) -> None:
    """From file to file, block by block, and in memory; with a tokenizer, and without."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    for there in (False, True):
        if there:
            (tmp_path / "llama" / "tokenizer.json").write_text("{}")
        cards = []
        for flow in ("", "--stream", "--no-stream"):
            out = tmp_path / f"out{flow}{there}"
            line = ("--for", "transformers", "--bits", "8", "--effort", "fast", *filter(None, [flow]), "-o", out)
            done = quark("quantize", tmp_path / "llama", *line)
            assert (done.code, done.err) == (0, "")
            printed = next(line.removeprefix("run it: ") for line in done.out.splitlines() if line.startswith("run it"))
            assert commands(out)[0] == printed.replace(str(out), "FOLDER")
            assert ("TOKENIZER stands for" in done.out) == ("TOKENIZER stands for" in text_of(out)) == (not there)
            cards.append(text_of(out))
        assert len({*cards}) == 1


def text_of(folder: Path) -> str:
    """The text of the card."""
    return (folder / "README.md").read_text(encoding="utf-8")


def pairs(name: str) -> set[tuple[str, str]]:
    """The formats and schemes that a program is known to load."""
    return {(fact.form, fact.scheme) for fact in GOALS[name].loaded(False)}


def test_the_card_of_an_encoder_loads_it_with_its_own_package(tmp_path: Path) -> None:
    """And a plan says nothing of the ids of positions that older folders hold, which are no layers."""
    encoder = model_folder("sentence_encoder", tmp_path / "encoder")
    weights = load_file(encoder / "model.safetensors")
    save_file(
        {**weights, "embeddings.position_ids": torch.arange(8)[None]}, encoder / "model.safetensors", {"format": "pt"}
    )
    for listed, library in ((False, "transformers"), (True, "sentence-transformers")):
        if listed:
            (encoder / "modules.json").write_text('[{"path": "", "type": "Transformer"}]')
        out = tmp_path / library
        done = quark("quantize", encoder, "--for", "transformers", "--no-verdict", "-o", out)
        assert done.code == 0 and metadata_load(out / "README.md")["library_name"] == library
        (command,) = commands(out)
        assert f"run it: {command}".replace("FOLDER", str(out)) in done.out.splitlines()
        assert ("SentenceTransformer" in command) == listed and ("t.BertModel.from_pretrained" in command) != listed
        assert ('SentenceTransformer("FOLDER")' in (out / "README.md").read_text()) == listed
    planned = quark("plan", encoder, "--for", "transformers")
    assert planned.code == 0 and "lie beside" not in planned.out


@pytest.mark.slow
def test_a_command_names_a_tokenizer_where_the_folder_has_none(tmp_path: Path) -> None:
    choice = choose(GoalRequest(goal="vllm"))
    assert choice.command("a b", tokenizer=False) == "vllm serve 'a b' --tokenizer TOKENIZER"
    for name, there in {
        "tokenizer.json": True, "tokenizer.model": True, "vocab.txt": True, "tekken.json": True, "spm.model": True,
        "preprocessor_config.json": True, "config.json": False, "model.safetensors": False, "README.md": False,
    }.items():  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        assert has_tokenizer(folder) == there, name


def test_another_program_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"goal='vlm' is unknown\. Did you mean 'vllm'"):
        exported(tmp_path / "source", tmp_path / "out", goal="vlm")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_converted_folder_names_the_float_model(tmp_path: Path) -> None:
    out = exported(tmp_path / "tiny", tmp_path / "quantized", SOURCE)
    again = convert(out, tmp_path / "again", "compressed-tensors")
    assert ModelCard.load(again / "README.md").data.base_model == "tiny"
    assert (again / "README_base.md").read_text() == SOURCE
    (out / "README.md").write_text("---\nbase_model: [org/x]\nbase_model_relation: finetune\n---\n")
    tuned = convert(out, tmp_path / "tuned", "compressed-tensors")
    assert ModelCard.load(tuned / "README.md").data.base_model == "quantized", "org/x is what that was tuned from"


def figures(data: str = "heldout.txt", value: float = 12.5, **changes: Any) -> Figures:
    options: dict[str, Any] = {
        "kind": "text", "arguments": {"samples": 4, "tokens": 256}, "task": "text-generation",
        "metrics": [("perplexity", "Perplexity", value)], "lines": {"Perplexity": f"{value}"}, **changes,
    }  # fmt: skip
    return Figures(data, **options)


def test_hubs_read_the_figures(tmp_path: Path) -> None:
    """By the client's own reader, and written by it again."""
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    add_figures(tmp_path, figures())
    card = ModelCard.load(tmp_path / "README.md")
    (result,) = card.data.eval_results or ()
    assert (result.task_type, result.dataset_type, result.dataset_name) == ("text-generation", "text", "heldout.txt")
    assert (result.metric_type, result.metric_name, result.metric_value) == ("perplexity", "Perplexity", 12.5)
    assert result.dataset_args == {"samples": 4, "tokens": 256}
    assert card.data.to_dict()["model-index"][0]["name"] == tmp_path.name and card.data.license == "mit"
    again = ModelCardData(**card.data.__dict__)
    assert again.to_yaml() == card.data.to_yaml()


def test_figures_replace_those_on_the_same_data(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"README\.md cannot be read"):
        add_figures(tmp_path, figures())
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("# Card\n")
    for data, value in (("a|b.txt", 1.0), ("c.txt", 2.0), ("a|b.txt", 3.0)):
        add_figures(tmp_path, figures(data, value))
    text = (tmp_path / "README.md").read_text()
    assert "# Card\n" in text and "| c.txt | Perplexity | 2.0 |\n| a\\|b.txt | Perplexity | 3.0 |\n" in text
    results = ModelCard.load(tmp_path / "README.md").data.eval_results or ()
    assert sorted((each.dataset_name, each.metric_value) for each in results) == [("a|b.txt", 3.0), ("c.txt", 2.0)]


def test_figures_without_a_task_are_in_the_table_only(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Card\n")
    add_figures(tmp_path, figures(task=None))
    assert "| Perplexity | 12.5 |" in (tmp_path / "README.md").read_text()
    assert ModelCard.load(tmp_path / "README.md").data.eval_results is None


def test_a_damaged_card_is_no_place_for_figures(tmp_path: Path) -> None:
    for damaged in ("---\nmodel-index: [{name: x, results: 1}]\n---\n", "---\n{[\n---\n"):
        (tmp_path / "README.md").write_text(damaged)
        with pytest.raises(FormatError, match="front matter that cannot be read"):
            add_figures(tmp_path, figures())
        assert (tmp_path / "README.md").read_text() == damaged
