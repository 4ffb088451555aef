"""Goal: a program that a quantized model is made for, and what is chosen for it where nothing is said."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quark.core.names.registry import Registry
from quark.goals.facts import ONNX_FILE, Answer, Fact, facts_of

WITHOUT_TOKENIZER = "TOKENIZER stands for a folder with a tokenizer, or its name on a hub: {out} has none."
"""The line after a command that ends with `serve_tokenizer`."""


@dataclass(frozen=True)
class GoalDefaults:
    """The defaults of a goal for one kind of model.

    Attributes:
        default: Form and scheme where nothing is said.
        bits: Bits of a weight -> form and scheme.
        why: The reason for the default, a clause.
        serve: The command that runs the result; `{out}` is its path.
        serve_pipeline: The command that runs a pipeline of several models, where it is another.
        serve_class: The command that runs a model that does not go on writing a text, where it is another;
            `{model_class}` is the name of its class.
        serve_sentences: The command that runs a folder of sentence-transformers, where it is another.
        without_data: The same as `default` where there are no calibration data; None: the same.
        mixed: Form and schemes of a budget, in which layers differ; no schemes: what the form chooses from by itself.
            None: the program takes one scheme for all layers, or no other was tried.
        target: Of an ONNX file: a value of --target; None as the configuration says.
        targets: Values of --target that may be given beside the goal.
        cached: Bits of a weight -> form and scheme where a cache of keys and values is quantized beside it, the first
            where nothing is said; none: those of `bits`.
        serve_cache: Words that the command ends with for such a cache.
        serve_tokenizer: Words that the command ends with where the model has no tokenizer, and the program looks for
            one; TOKENIZER stands for its folder, or its name on a hub.
    """

    default: tuple[str, str]
    bits: Mapping[int, tuple[str, str]]
    why: str
    serve: str
    target: str | None = None
    serve_pipeline: str = ""
    serve_class: str = ""
    serve_sentences: str = ""
    targets: tuple[str, ...] = ()
    without_data: tuple[str, str] | None = None
    mixed: tuple[str, tuple[str, ...]] | None = None
    cached: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    serve_cache: str = ""
    serve_tokenizer: str = ""

    def of_other_model(self, model_class: str, sentences: bool) -> GoalDefaults:
        """The defaults with the command for a model that does not go on writing a text.

        Args:
            model_class: The name of its class.
            sentences: Whether its folder is one of sentence-transformers.
        """
        if sentences and self.serve_sentences:
            return replace(self, serve=self.serve_sentences, serve_tokenizer="")
        if not self.serve_class:
            return self
        # The class loads without a tokenizer, and {out} is replaced later.
        return replace(self, serve=self.serve_class.replace("{model_class}", model_class), serve_tokenizer="")

    def command(self, output: str, cache: bool = False, tokenizer: bool = True) -> str:
        """The command that runs a result: what is printed, and what the model card has.

        Args:
            output: Path of the folder or file.
            cache: Whether its cache of keys and values is quantized.
            tokenizer: Whether there is a tokenizer beside the model, or it reads no text.
        """
        words = self.serve.format(out=shlex.quote(output)) + (self.serve_cache if cache else "")
        return words if tokenizer else words + self.serve_tokenizer


@dataclass(frozen=True)
class RuntimeGoal:
    """One program.

    Attributes:
        name: As --for takes it.
        program: In the facts.
        folder: Of a model folder; None where the program takes none.
        onnx: Of an ONNX file; None where the program takes none.
        extra: Pip packages that the program needs to read such a file.
        cache: Schemes of a cache of keys and values whose scales it reads.
        cache_layers: Form -> names of the layers beside which it finds scales of a cache; of other forms, all that they
            hold.
        fuses: Whether it makes one layer of several (`quark.goals.fused_layers`), which must have one scheme then.
        reader: What its folders are written for, as `export_safetensors` has it.
        float_layers: Whether layers are known that it builds in float (`quark.goals.float_layers`).
        networks: Whether its folders are those of networks of diffusers, and not of transformers.
        rotates: Forms in which it runs the rotations of inputs that a folder holds.
        heads: Forms in which it reads a quantized output head; None: all that it reads.
    """

    name: str
    program: str
    folder: GoalDefaults | None = None
    onnx: GoalDefaults | None = None
    extra: tuple[str, ...] = field(default=())
    cache: tuple[str, ...] = ()
    cache_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fuses: bool = False
    reader: str = "transformers"
    float_layers: bool = False
    networks: bool = False
    rotates: tuple[str, ...] = ()
    heads: tuple[str, ...] | None = None

    def defaults(self, onnx: bool) -> GoalDefaults | None:
        """Return the defaults for a kind of model."""
        return self.onnx if onnx else self.folder

    def facts(self, onnx: bool) -> list[Fact]:
        """Return the facts of a kind of model."""
        return [fact for fact in facts_of(self.program) if (fact.form == ONNX_FILE) == onnx]

    def loaded(self, onnx: bool) -> list[Fact]:
        """Return the facts of files that the program takes."""
        return [fact for fact in self.facts(onnx) if fact.answer is not Answer.REFUSED]


GOALS: Registry[RuntimeGoal] = Registry("goal")
