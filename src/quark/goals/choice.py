"""Choice: what is done for a goal, checked against the facts before any work."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from quark.core.names.scheme_families import family_of, named_in, suggestion
from quark.core.schemes import in_smaller_groups
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.goals.efforts import ROTATION, effort_of, require_data, steps_for
from quark.goals.facts import ONNX_FILE, Answer, Fact
from quark.goals.goal import GOALS, GoalDefaults, RuntimeGoal

MIX = "mix"
"""In place of a scheme, where layers differ."""

WIDE = 8
"""Bits of a weight of models that do not go on writing a text, where nothing is asked for."""
_WHY_WIDE = (
    "8 bits for a model that does not go on writing a text: of a MiniLM, a sentence encoder, 4 bits change one of six "
    "nearest sentences, and 8 bits one of fifty"
)
_ONNX_EFFORTS = {
    "fast": "ranges alone: no algorithms",
    "balanced": "the quick steps of recovery, for at most a minute",
    "best": "all steps of recovery, for at most ten minutes; what helps on held-out samples is kept",
}
"""Effort -> what it means for an ONNX file."""


@dataclass(frozen=True, kw_only=True)
class GoalRequest:
    """A request for a goal.

    Attributes:
        goal: Its name.
        onnx: Whether the model is an ONNX file; else a folder, or a module.
        scheme, form: None: the goal's. A family such as "int4" is the goal's scheme of it.
        bits: Of a weight, in place of a scheme; a number that the goal has no scheme of is a budget.
        effort: One of EFFORTS; None: balanced where there are data, else fast, before it is known
            how long a model takes.
        algorithms: In place of those of the effort.
        has_data: Whether calibration data are given.
        budget: Whether layers get schemes of their own, within bits or a size.
        candidates: What a budget chooses from, in place of the goal's schemes.
        cache: Scheme of a cache of keys and values that is quantized beside the weights.
        cache_forms: The forms that have a place for it; None: all that there are.
    """

    goal: str
    onnx: bool = False
    scheme: str | None = None
    bits: float | None = None
    form: str | None = None
    effort: str | None = None
    algorithms: Sequence[str] | None = None
    has_data: bool = False
    budget: bool = False
    candidates: Sequence[str] = ()
    cache: str | None = None
    cache_forms: Collection[str] | None = None


@dataclass(frozen=True)
class GoalChoice:
    """The choice for a goal, and its reasons.

    Attributes:
        asked: What was asked for.
        goal: For which program.
        defaults: What the program has for this kind of model.
        scheme: Name of a scheme, or of a configuration of the ONNX flow.
        form: A value of --export-format; ONNX_FILE for an ONNX file.
        effort: One of EFFORTS.
        algorithms: As --algorithm takes them.
        reasons: Choice -> why.
        rotates: Whether the effort asks for a rotation that the program runs, where the model is in memory.
        distills: Whether the effort asks for texts of the model's own and distillation, where these are possible.
        texts: How many the model writes; 0 until it is known, and where there are none.
        left_out: What of the effort is left out -> why.
        decided_here: Whether the effort was chosen by what this machine has of time and memory.
        mixed: The schemes that a budget chooses from, none: what the form chooses from; None: one scheme for all.
    """

    asked: GoalRequest
    goal: RuntimeGoal
    defaults: GoalDefaults
    scheme: str
    form: str
    effort: str
    algorithms: tuple[str, ...]
    reasons: dict[str, str]
    mixed: tuple[str, ...] | None = None
    distills: bool = False
    texts: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)
    decided_here: bool = False
    rotates: bool = False

    def rotated(self, why_not: str | None) -> GoalChoice:
        """The choice with the rotation that its effort asks for before the solver; or why it is left out.

        Args:
            why_not: What keeps the whole model out of memory; None: nothing does.
        """
        if not self.rotates:
            return self
        if why_not is not None:
            return replace(self, left_out={**self.left_out, "rotation": why_not})
        *first, solver = self.algorithms
        why = f"{self.reasons['algorithms']}; rotations in each forward, which {self.goal.program} runs"
        return replace(
            self, algorithms=(*first, ROTATION, solver), reasons={**self.reasons, "algorithms": why}, rotates=False
        )

    def completed(self, texts: int, algorithms: Sequence[str], left_out: Mapping[str, str]) -> GoalChoice:
        """The choice with what its effort adds for a model and a machine.

        Args:
            texts: How many the model writes.
            algorithms: After the others.
            left_out: What is left out -> why.
        """
        reasons = dict(self.reasons)
        if texts:
            reasons["texts"] = "the model's own, beside the data: more to learn from, and nobody's data"
        if algorithms:
            reasons["algorithms"] += "; distillation removes a fifth to a third of the rest"
        return replace(
            self,
            algorithms=(*self.algorithms, *algorithms),
            texts=texts,
            left_out={**self.left_out, **left_out},
            reasons=reasons,
        )

    def fitted(self, fits: Callable[[str], bool]) -> GoalChoice:
        """The choice for a model: in smaller groups where those of the scheme do not divide most of its weights.

        A scheme that was asked for by its name stays, and so does one of which the program loads no smaller groups.

        Args:
            fits: Whether the groups of a scheme divide the model.
        """
        if self.asked.scheme == self.scheme or self.mixed is not None or self.asked.onnx:
            return self
        known = {fact.scheme: fact for fact in self.goal.loaded(False) if fact.form == self.form}
        others = [name for name in in_smaller_groups(self.scheme) if name in known]
        smaller = next(filter(fits, others), None) if others and not fits(self.scheme) else None
        if smaller is None:
            return self
        why = f"{self.reasons['scheme']}; in smaller groups, as those of {self.scheme} do not divide this model"
        return replace(self, scheme=smaller, reasons={**self.reasons, "scheme": why, "format": str(known[smaller])})

    def of_other_model(self, model_class: str, sentences: bool) -> GoalChoice:
        """The choice for a model that does not go on writing a text: 8 bits where nothing is asked for.

        Such a model is not calibrated unless it is asked for, and 4 bits to nearest change what it finds.

        Args:
            model_class, sentences: As for `GoalDefaults.of_other_model`.
        """
        asked, choice = self.asked, self
        said = asked.scheme is not None or asked.bits is not None or asked.algorithms is not None
        if not (said or asked.budget or asked.cache) and WIDE in self.defaults.bits:
            with suppress(NotSupportedError):  # the form that is asked for has no such scheme
                wide = choose(replace(asked, bits=float(WIDE)))
                choice = replace(wide, asked=asked, reasons={**wide.reasons, "scheme": _WHY_WIDE})
        return replace(choice, defaults=choice.defaults.of_other_model(model_class, sentences))

    def rows(self) -> list[tuple[str, str, str]]:
        """Return rows of a table: setting, choice, reason."""
        form = "onnx" if self.asked.onnx else self.form
        algorithms = ", ".join(self.algorithms) or "none"
        values = {"scheme": self.scheme, "format": form, "effort": self.effort, "algorithms": algorithms}
        if self.texts:
            values["texts"] = str(self.texts)
        chosen = [(what, value, self.reasons.get(what, "")) for what, value in values.items()]
        return [*chosen, *(("left out", what, why) for what, why in self.left_out.items())]

    def __str__(self) -> str:
        form = "onnx" if self.asked.onnx else self.form
        steps = "".join(f", {name}" for name in self.algorithms)
        why = "; ".join(self.reasons.values())
        return f"For {self.goal.program}: {self.scheme} as {form}{steps} ({self.effort}), because: {why}."

    def target_with(self, asked: str | None) -> str | None:
        """The value of --target: the one asked for beside the goal, or that of the goal.

        Raises:
            ConfigError: It is of another program than the goal.
        """
        targets = self.defaults.targets
        if asked is not None and asked not in targets:
            possible = f"--target {', '.join(targets)}, or --for alone" if targets else "--for alone"
            raise ConfigError(
                f"--target {asked} does not fit {self.goal.program}, the program of --for {self.goal.name}. Possible: "
                f"{possible}."
            )
        return asked or self.defaults.target

    def of_pipeline(self) -> GoalChoice:
        """The choice with the command that runs a whole pipeline, where its program has another one for that."""
        return replace(self, defaults=replace(self.defaults, serve=self.defaults.serve_pipeline or self.defaults.serve))

    def command(self, output: str, tokenizer: bool = True) -> str:
        """The command that runs the result; see `GoalDefaults.command`."""
        return self.defaults.command(output, self.asked.cache is not None, tokenizer)


def choose(asked: GoalRequest) -> GoalChoice:
    """Return the choice for a goal.

    Raises:
        ConfigError: No such goal, effort or number of bits; the program takes no such kind of model.
        NotSupportedError: The program refuses the scheme, or nobody has tried it; names what it loads.
        CalibrationError: The effort needs data, and the model is an ONNX file.
    """
    goal = GOALS[asked.goal]
    defaults = goal.onnx if asked.onnx else goal.folder
    if defaults is None:
        raise _takes_none(asked)
    if asked.cache is not None:
        defaults = _beside_cache(asked, goal, defaults, asked.cache)
    known, mixed = _Known(asked, goal, defaults, goal.facts(asked.onnx)), None
    if asked.budget or (asked.bits is not None and asked.bits not in defaults.bits and asked.scheme is None):
        fact, mixed = known.mix()
        scheme, why = defaults.default[1], "layers that lose most get most bits"
    else:
        fact, why = known.one_scheme()
        scheme = fact.scheme
    effort = effort_of(asked.effort, asked.has_data)
    if asked.effort is not None and asked.algorithms is None:
        require_data(effort, asked.has_data, asked.onnx)
    reasons, algorithms, distills = {"scheme": why, "format": str(fact)}, tuple(asked.algorithms or ()), False
    rotates = False
    if asked.algorithms is not None:
        reasons["algorithms"] = "asked for"
    elif asked.onnx:
        reasons["effort"] = _ONNX_EFFORTS[effort]
    else:
        steps = steps_for(scheme, effort)
        reasons["algorithms"], algorithms, distills = steps.why, steps.algorithms, steps.distills
        rotates = steps.rotates and fact.form in goal.rotates
    return GoalChoice(
        asked,
        goal,
        defaults,
        scheme if mixed is None else MIX,
        fact.form,
        effort,
        algorithms,
        reasons,
        mixed,
        distills,
        rotates=rotates,
    )


@dataclass(frozen=True)
class _Known:
    """The request for a goal, and the facts of its program for that kind of model."""

    asked: GoalRequest
    goal: RuntimeGoal
    defaults: GoalDefaults
    facts: list[Fact]

    def one_scheme(self) -> tuple[Fact, str]:
        """The fact of the scheme that all layers get, and the reason for it."""
        scheme, bits, has_data = self.asked.scheme, self.asked.bits, self.asked.has_data
        rows = self.defaults.bits
        if scheme is not None and bits is not None:
            raise ConfigError("--scheme and --bits exclude each other. Possible: one of them.")
        if bits is not None:
            return self.loaded(*rows[int(bits)]), f"{bits:g} bits"
        if scheme is None:
            without = None if has_data else self.defaults.without_data
            return self.loaded(*(without or self.defaults.default)), self.defaults.why
        form, name = self.row_of(scheme)
        return self.loaded(form, name), "asked for" if name == scheme else f"{scheme}: here it is {name}"

    def row_of(self, scheme: str) -> tuple[str | None, str]:
        """Form and scheme of a name; of a family, of the usual one of it, or of what the program loads."""
        usual = [self.defaults.default, *self.defaults.bits.values()]
        if all(fact.scheme != scheme for fact in self.facts):
            loaded = [fact.scheme for fact in self.facts if fact.answer is not Answer.REFUSED]
            scheme = named_in(scheme, [name for _, name in usual]) or named_in(scheme, loaded) or scheme
        return next((row for row in usual if row[1] == scheme), (None, scheme))

    def loaded(self, preferred: str | None, scheme: str) -> Fact:
        """The fact of a scheme in the form that is asked for, the preferred one, or the best known.

        Raises:
            NotSupportedError: The program loads it in none, or in none of those that hold a cache.
        """
        form, beside = self.asked.form, self.asked.cache_forms
        known = [fact for fact in self.facts if fact.scheme == scheme and form in (None, fact.form)]
        known = [fact for fact in known if fact.answer is not Answer.REFUSED]
        if not known:
            raise self.unknown(scheme, form)
        usable = [fact for fact in known if beside is None or fact.form in beside]
        if not usable:
            others = sorted({fact.scheme for fact in self.goal.loaded(self.asked.onnx) if fact.form in (beside or ())})
            raise NotSupportedError(
                f"{self.goal.program} is known to load {scheme} as {', '.join(fact.form for fact in known)} only, "
                f"which has no place for a KV cache. Possible beside one: {', '.join(others)}."
            )
        return min(usable, key=lambda fact: (fact.form != preferred, fact.answer is not Answer.RIGHT))

    def mix(self) -> tuple[Fact, tuple[str, ...]]:
        """The fact of the form whose layers have schemes of their own, and the candidates."""
        asked, goal, bits = self.asked, self.goal, self.asked.bits
        if self.defaults.mixed is None:
            raise self.no_mix()
        if bits is not None and not 0 < bits < math.inf:
            known = ", ".join(map(str, self.defaults.bits))
            raise ConfigError(f"--bits {bits:g} is no number of bits. Possible for {goal.name}: {known}, or between.")
        form, own = self.defaults.mixed
        if asked.form not in (None, form):
            raise NotSupportedError(f"A mix of schemes for {goal.program} is written as {form}, not as {asked.form}.")
        loaded = {fact.scheme: fact for fact in goal.loaded(asked.onnx) if fact.form == form}
        # The block types of GGUF files are no schemes: who reads one of them reads all.
        for name in asked.candidates if own or form != "gguf" else ():
            if name not in loaded:
                raise self.unknown(name, form)
        candidates = tuple(asked.candidates) or own
        if own and len(candidates) < 2:
            raise ConfigError(f"A mix needs at least two candidates, got {', '.join(candidates)}.")
        first = loaded.get(next(iter(candidates), ""))
        return first or loaded[self.defaults.default[1]], candidates

    def no_mix(self) -> NotSupportedError:
        """The error for a mix that no format of the program holds."""
        asked = "A size" if self.asked.bits is None else f"--bits {self.asked.bits:g}"
        known = ", ".join(map(str, self.defaults.bits))
        others = ", ".join(name for name, row in GOALS.items() if row.folder is not None and row.folder.mixed)
        return NotSupportedError(
            f"{asked} is a mix of schemes, which no format of {self.goal.program} is known to hold. Possible for "
            f"{self.goal.name}: --bits {known}. A mix{' of a model folder' if self.asked.onnx else ''}: {others}."
        )

    def unknown(self, scheme: str, form: str | None) -> Exception:
        """The error for a scheme that is refused, untried, or no scheme at all."""
        program, rows = self.goal.program, [fact for fact in self.facts if form in (None, fact.form)]
        tried = [fact for fact in rows if fact.scheme == scheme]
        loaded = sorted({fact.scheme for fact in rows if fact.answer is not Answer.REFUSED})
        written = f" as {form}" if form not in (None, ONNX_FILE) else ""
        possible = f"It loads{written}: {', '.join(loaded) or 'nothing'}."
        if tried:
            return NotSupportedError(f"{program} {tried[0].version} refuses {scheme}{written}. {possible}")
        if is_known(scheme, self.asked.onnx):
            return NotSupportedError(
                f"Nobody has tried {scheme}{written} in {program}. {possible} Without --for it is written."
            )
        if family_of(scheme):
            return NotSupportedError(
                f"There is no {scheme} that {program} loads{written}.{_of_others(scheme)} {possible}"
            )
        return ConfigError(f"Unknown scheme {scheme!r}. {suggestion(scheme, loaded) or did_you_mean(scheme, loaded)}")


def _of_others(family: str) -> str:
    """A sentence with the usual scheme of a family and the goals that have it; empty where there are none."""
    usual, *_ = family_of(family)
    others = [name for name, goal in GOALS.items() if any(fact.scheme == usual for fact in goal.loaded(False))]
    return f" As {usual} there is one for {', '.join(others)}." if others else ""


def _takes_none(asked: GoalRequest) -> ConfigError:
    """The error for a program that takes no model of this kind."""
    others = ", ".join(name for name, row in GOALS.items() if row.defaults(asked.onnx) is not None)
    kind = "an ONNX file" if asked.onnx else "a model folder"
    return ConfigError(f"--for {asked.goal} takes no {kind.split(' ', 1)[1]}. Possible for {kind}: {others}.")


def _beside_cache(asked: GoalRequest, goal: RuntimeGoal, defaults: GoalDefaults, cache: str) -> GoalDefaults:
    """Return the defaults of a goal for a model whose cache of keys and values is quantized, too.

    Raises:
        NotSupportedError: The program reads no such cache, or the form has no place for it.
    """
    if cache not in goal.cache:
        others = ", ".join(name for name, row in GOALS.items() if cache in row.cache)
        own = f"a cache in {', '.join(goal.cache)}" if goal.cache else f"--for {others}"
        raise NotSupportedError(
            f"{goal.program} is not known to read a cache of keys and values in {cache}. Possible: {own}. Without "
            "--for it is written."
        )
    forms = asked.cache_forms
    if asked.form is not None and forms is not None and asked.form not in forms:
        raise NotSupportedError(
            f"The {asked.form} format has no place for a KV cache in {cache}. Possible: {', '.join(sorted(forms))}."
        )
    if not defaults.cached:
        return defaults
    return replace(defaults, default=next(iter(defaults.cached.values())), bits=defaults.cached, without_data=None)


def fusing_programs(form: str, schemes: Sequence[str]) -> tuple[str, ...]:
    """The programs that make one layer of several, and that are not known to refuse one of these schemes."""
    return tuple(
        goal.program
        for goal in GOALS.values()
        if goal.fuses
        and not any(
            fact.scheme in schemes and fact.form == form and fact.answer is Answer.REFUSED
            for fact in goal.facts(onnx=False)
        )
    )


def is_known(scheme: str, onnx: bool) -> bool:
    """Return True where there is a scheme of this name, for any program."""
    from quark.core.schemes import SCHEMES
    from quark.goals.facts import FACTS

    if onnx:  # names of configurations are those of the ONNX flow, which is not loaded for a question
        return any(fact.scheme == scheme and fact.form == ONNX_FILE for fact in FACTS)
    return scheme in SCHEMES or any(fact.scheme == scheme for fact in FACTS if fact.form != ONNX_FILE)
