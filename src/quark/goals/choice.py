"""Choice: what is done for a goal, checked against the facts before any work."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from quark.core.names.scheme_families import family_of, named_in, suggestion
from quark.core.schemes import in_smaller_groups
from quark.errors import ConfigError, NotSupportedError, did_you_mean
from quark.goals.efforts import effort_of, require_data, steps_for
from quark.goals.facts import ONNX_FILE, Answer, Fact
from quark.goals.goal import GOALS, GoalDefaults, RuntimeGoal


@dataclass(frozen=True)
class GoalChoice:
    """What was chosen, and why.

    Attributes:
        goal: For which program.
        scheme: Name of a scheme, or of a configuration of the ONNX flow.
        form: A value of --export-format; ONNX_FILE for an ONNX file.
        effort: One of EFFORTS.
        algorithms: As --algorithm takes them.
        reasons: Choice -> why.
        serve: The command that runs the result; `{out}` is its path.
        target: Of an ONNX file: a value of --target, or None.
        targets: Values of --target that may be given beside it.
        given: Whether the scheme was asked for, and not the default.
        named: Whether it was asked for by its own name, and not by bits or a family.
        mixed: The schemes that a budget chooses from, none: what the form chooses from; None: one scheme for all.
    """

    goal: RuntimeGoal
    scheme: str
    form: str
    effort: str
    algorithms: tuple[str, ...]
    reasons: dict[str, str]
    serve: str
    target: str | None = None
    given: bool = False
    targets: tuple[str, ...] = ()
    mixed: tuple[str, ...] | None = None
    named: bool = False

    def fitted(self, fits: Callable[[str], bool]) -> GoalChoice:
        """The choice for a model: in smaller groups where those of the scheme do not divide most of its weights.

        A scheme that was asked for by its name stays, and so does one of which the program loads no smaller groups.

        Args:
            fits: Whether the groups of a scheme divide the model.
        """
        if self.named or self.mixed is not None or self.form == ONNX_FILE:
            return self
        known = {fact.scheme: fact for fact in self.goal.loaded(False) if fact.form == self.form}
        others = [name for name in in_smaller_groups(self.scheme) if name in known]
        if not others or fits(self.scheme):
            return self
        found = next(filter(fits, others), None)
        if found is None:
            return self
        why = f"{self.reasons['scheme']}; in smaller groups, as those of {self.scheme} do not divide this model"
        return replace(self, scheme=found, reasons={**self.reasons, "scheme": why, "format": str(known[found])})

    def rows(self) -> list[tuple[str, str, str]]:
        """What, the choice, and the reason, for a table."""
        form = "onnx" if self.form == ONNX_FILE else self.form
        algorithms = ", ".join(self.algorithms) or "none"
        values = {"scheme": self.scheme, "format": form, "effort": self.effort, "algorithms": algorithms}
        return [(what, value, self.reasons.get(what, "")) for what, value in values.items()]

    def summary(self) -> tuple[str, str, str]:
        """Scheme, form with algorithms and effort, and why, for a line of the log."""
        form = "onnx" if self.form == ONNX_FILE else self.form
        steps = f", {', '.join(self.algorithms)}" if self.algorithms else ""
        return self.scheme, f"{form}{steps} ({self.effort})", "; ".join(self.reasons.values())

    def target_with(self, asked: str | None) -> str | None:
        """The value of --target: the one asked for beside the goal, or that of the goal.

        Raises:
            ConfigError: It is of another program than the goal.
        """
        if asked is not None and asked not in self.targets:
            possible = f"--target {', '.join(self.targets)}, or --for alone" if self.targets else "--for alone"
            raise ConfigError(
                f"--target {asked} is not of {self.goal.program}, which --for {self.goal.name} says. Possible: "
                f"{possible}."
            )
        return asked or self.target

    def for_type(self, model_type: str) -> GoalChoice:
        """The choice for models of a type, by their config.json: a program may refuse to run some in float16."""
        if model_type not in self.goal.bfloat16 or self.goal.folder is None:
            return self
        return replace(self, serve=self.serve.removesuffix(self.goal.folder.serve_options.get(self.form, "")))

    def of_pipeline(self) -> GoalChoice:
        """The choice with the command that runs a whole pipeline, where its program has another one for that."""
        offer = self.goal.folder
        return replace(self, serve=offer.serve_pipeline or self.serve) if offer is not None else self

    def command(self, output: str) -> str:
        """The command that runs the result.

        Args:
            output: Path of the folder or file that was made.
        """
        return self.serve.format(out=shlex.quote(output))


def choose(
    name: str,
    onnx: bool,
    *,
    scheme: str | None = None,
    bits: float | None = None,
    form: str | None = None,
    effort: str | None = None,
    algorithms: Sequence[str] | None = None,
    has_data: bool = False,
    budget: bool = False,
    candidates: Sequence[str] = (),
    cache: str | None = None,
    holding: Collection[str] | None = None,
) -> GoalChoice:
    """What is done for a goal.

    Args:
        name: Of the goal.
        onnx: Whether the model is an ONNX file; else a folder.
        scheme, form: Asked for; None: the goal's. A family such as "int4" is the goal's scheme of it.
        bits: Of a weight, in place of a scheme; a number that the goal has no scheme of is a budget.
        effort: One of EFFORTS; None: balanced where there are data, else fast.
        algorithms: Asked for, in place of those of the effort.
        has_data: Whether calibration data are given.
        budget: Whether layers get schemes of their own, within bits or a size.
        candidates: What a budget chooses from, in place of the goal's schemes.
        cache: Scheme of a cache of keys and values that is quantized beside the weights.
        holding: The forms that have a place for it; None: all that there are.

    Raises:
        ConfigError: No such goal, effort or number of bits; the program takes no such kind of model.
        NotSupportedError: The program refuses the scheme, or nobody has tried it; names what it loads.
        CalibrationError: The effort needs data, and the model is an ONNX file.
    """
    goal = GOALS[name]
    defaults = _defaults_of(goal, name, onnx)
    if cache is not None:
        defaults = _with_cache(goal, defaults, cache, holding or (), form)
    mixed = None
    if budget or (bits is not None and bits not in defaults.bits and scheme is None):
        chosen_form, mixed, why = _mixed(goal, defaults, onnx, bits, form, candidates)
        chosen = defaults.default[1]
    else:
        chosen_form, chosen, why = _scheme(goal, defaults, onnx, scheme, bits, form, has_data, holding)
    level = effort_of(effort, has_data)
    if effort is not None and algorithms is None:
        require_data(level, has_data, onnx)
    known = mixed[0] if mixed else chosen
    steps, because = _steps(onnx, algorithms, chosen, level)
    reasons = {"scheme": why, "format": str(_fact(goal, onnx, chosen_form, known)), **because}
    return GoalChoice(
        goal, chosen if mixed is None else MIX, chosen_form, level, steps, reasons,
        defaults.serve_as(chosen_form) + (defaults.serve_cache if cache else ""),
        defaults.target, given=scheme is not None or bits is not None, targets=defaults.targets, mixed=mixed,
        named=scheme == chosen,
    )  # fmt: skip


def _steps(
    onnx: bool, algorithms: Sequence[str] | None, scheme: str, level: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The algorithms, and the reason: those that are asked for, or those of an effort."""
    if algorithms is not None:
        return tuple(algorithms), {"algorithms": "asked for"}
    if onnx:
        return (), {"effort": ONNX_EFFORTS[level]}
    found = steps_for(scheme, level)
    return found.algorithms, {"algorithms": found.why}


MIX = "mix"
"""In place of a scheme, where layers differ."""


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


def _defaults_of(goal: RuntimeGoal, name: str, onnx: bool) -> GoalDefaults:
    """What a goal makes of this kind of model. Raises ConfigError where its program takes none."""
    defaults = goal.defaults(onnx)
    if defaults is None:
        kind = "an ONNX file" if onnx else "a model folder"
        others = ", ".join(other for other, row in GOALS.items() if row.defaults(onnx) is not None)
        raise ConfigError(f"--for {name} takes no {kind.split(' ', 1)[1]}. Possible for {kind}: {others}.")
    return defaults


def _with_cache(
    goal: RuntimeGoal, defaults: GoalDefaults, cache: str, holding: Collection[str], form: str | None
) -> GoalDefaults:
    """What a goal makes of a model whose cache of keys and values is quantized, too.

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
    if form is not None and form not in holding:
        raise NotSupportedError(
            f"The {form} format has no place for a KV cache in {cache}. Possible: {', '.join(sorted(holding))}."
        )
    if not defaults.cached:
        return defaults
    return replace(defaults, default=next(iter(defaults.cached.values())), bits=defaults.cached, without_data=None)


def _no_mix(goal: RuntimeGoal, defaults: GoalDefaults, onnx: bool, bits: float | None) -> NotSupportedError:
    asked = "A size" if bits is None else f"--bits {bits:g}"
    known = ", ".join(map(str, defaults.bits))
    others = ", ".join(name for name, row in GOALS.items() if row.folder is not None and row.folder.mixed)
    return NotSupportedError(
        f"{asked} is a mix of schemes, which no format of {goal.program} is known to hold. Possible for "
        f"{goal.name}: --bits {known}. A mix{' of a model folder' if onnx else ''}: {others}."
    )


def _mixed(
    goal: RuntimeGoal,
    defaults: GoalDefaults,
    onnx: bool,
    bits: float | None,
    form: str | None,
    candidates: Sequence[str],
) -> tuple[str, tuple[str, ...], str]:
    """Form, candidates, and the reason for layers with schemes of their own."""
    if defaults.mixed is None:
        raise _no_mix(goal, defaults, onnx, bits)
    if bits is not None and not 0 < bits < math.inf:
        known = ", ".join(map(str, defaults.bits))
        raise ConfigError(f"--bits {bits:g} is no number of bits. Possible for {goal.name}: {known}, or between.")
    made, own = defaults.mixed
    if form not in (None, made):
        raise NotSupportedError(f"A mix of schemes for {goal.program} is written as {made}, not as {form}.")
    # The block types of GGUF files are no schemes: who reads one of them reads all.
    for name in candidates if own or made != "gguf" else ():
        _in_form(goal, onnx, name, made, made)
    if own and len(candidates or own) < 2:
        raise ConfigError(f"A mix needs two candidates at least, got {', '.join(candidates)}.")
    return made, tuple(candidates) or own, "layers that lose most get most bits"


ONNX_EFFORTS = {
    "fast": "ranges alone: no algorithms",
    "balanced": "the quick steps of recovery, for at most a minute",
    "best": "all steps of recovery, for at most ten minutes; what helps on held-out samples is kept",
}
"""Effort -> what it means for an ONNX file."""


def _scheme(
    goal: RuntimeGoal,
    defaults: GoalDefaults,
    onnx: bool,
    scheme: str | None,
    bits: float | None,
    form: str | None,
    has_data: bool,
    holding: Collection[str] | None,
) -> tuple[str, str, str]:
    """Form, scheme, and the reason."""
    if scheme is not None and bits is not None:
        raise ConfigError("--scheme and --bits say the same twice. Possible: one of them.")
    if bits is not None:
        if bits not in defaults.bits:
            known = ", ".join(map(str, defaults.bits))
            raise ConfigError(f"--bits {bits:g} is not known of {goal.program}. Possible for {goal.name}: {known}.")
        made, name = defaults.bits[int(bits)]
        return _in_form(goal, onnx, name, form, made, holding), name, f"{bits:g} bits"
    if scheme is None:
        made, name = defaults.default if has_data or defaults.without_data is None else defaults.without_data
        return _in_form(goal, onnx, name, form, made, holding), name, defaults.why
    rows = [defaults.default, *defaults.bits.values()]
    found = _named(goal, onnx, scheme, [name for _, name in rows])
    if found is None:
        raise _unknown(goal, onnx, scheme, form)
    preferred = next((row[0] for row in rows if row[1] == found), None)
    why = "asked for" if found == scheme else f"{scheme}: here it is {found}"
    return _in_form(goal, onnx, found, form, preferred, holding), found, why


def _named(goal: RuntimeGoal, onnx: bool, scheme: str, usual: Sequence[str]) -> str | None:
    """The scheme of a name; of a family, the usual one of it, or what the program loads."""
    if any(fact.scheme == scheme for fact in goal.facts(onnx)):
        return scheme
    return named_in(scheme, usual) or named_in(scheme, [fact.scheme for fact in goal.loaded(onnx)])


def _in_form(
    goal: RuntimeGoal,
    onnx: bool,
    scheme: str,
    form: str | None,
    preferred: str | None,
    holding: Collection[str] | None = None,
) -> str:
    """The form in which the program loads a scheme: the one asked for, the preferred one, or the best known.

    Raises:
        NotSupportedError: There is none, or none of those that hold a cache.
    """
    known = [fact for fact in goal.loaded(onnx) if fact.scheme == scheme and form in (None, fact.form)]
    if not known:
        raise _unknown(goal, onnx, scheme, form)
    usable = [fact for fact in known if holding is None or fact.form in holding]
    if not usable:
        others = sorted({fact.scheme for fact in goal.loaded(onnx) if fact.form in (holding or ())})
        raise NotSupportedError(
            f"{goal.program} is known to load {scheme} as {', '.join(fact.form for fact in known)} only, which has no "
            f"place for a KV cache. Possible beside one: {', '.join(others)}."
        )
    usable.sort(key=lambda fact: (fact.form != preferred, fact.answer is not Answer.RIGHT))
    return usable[0].form


def _fact(goal: RuntimeGoal, onnx: bool, form: str, scheme: str) -> Fact:
    return next(fact for fact in goal.loaded(onnx) if (fact.form, fact.scheme) == (form, scheme))


def _unknown(goal: RuntimeGoal, onnx: bool, scheme: str, form: str | None) -> Exception:
    """The error for a scheme that is refused, untried, or no scheme at all."""
    facts = [fact for fact in goal.facts(onnx) if fact.scheme == scheme and form in (None, fact.form)]
    loaded = sorted({fact.scheme for fact in goal.loaded(onnx) if form in (None, fact.form)})
    written = f" as {form}" if form not in (None, ONNX_FILE) else ""
    possible = f"It loads{written}: {', '.join(loaded) or 'nothing'}."
    if facts:
        return NotSupportedError(f"{goal.program} {facts[0].version} refuses {scheme}{written}. {possible}")
    if is_known(scheme, onnx):
        return NotSupportedError(
            f"Nobody has tried {scheme}{written} in {goal.program}. {possible} Without --for it is written."
        )
    if family_of(scheme):
        return NotSupportedError(f"{goal.program} is not known to load any {scheme}{written}. {possible}")
    return ConfigError(f"Unknown scheme {scheme!r}. {suggestion(scheme, loaded) or did_you_mean(scheme, loaded)}")


def is_known(scheme: str, onnx: bool) -> bool:
    """Whether there is a scheme of this name, for any program."""
    from quark.core.schemes import SCHEMES
    from quark.goals.facts import FACTS

    if onnx:  # names of configurations are those of the ONNX flow, which is not loaded for a question
        return any(fact.scheme == scheme and fact.form == ONNX_FILE for fact in FACTS)
    return scheme in SCHEMES or any(fact.scheme == scheme for fact in FACTS if fact.form != ONNX_FILE)
