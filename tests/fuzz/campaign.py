"""A campaign: the cases of a seed one after the other, their table, and how to make each bad one again."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np

from tests.fuzz.bases import Bases
from tests.fuzz.case import Case, Place
from tests.fuzz.child import Limits, in_child
from tests.fuzz.kinds import KINDS
from tests.fuzz.verdicts import VERDICTS, Verdict, verdict


@dataclass
class Campaign:
    """See `python -m tests.fuzz --help`.

    Attributes:
        cases: How many, spread evenly over the kinds.
        seed: With the name of a kind and the number of a case, all that a case is made from.
        kinds: Their names; None for all.
        case: Only this number.
        seconds: After which a case hangs.
        keep: Folder in which everything stays; None for a temporary one.
        show: Where the lines go.
    """

    cases: int = 200
    seed: int = 0
    kinds: Sequence[str] | None = None
    case: int | None = None
    seconds: float = 20.0
    keep: str | None = None
    show: TextIO = field(default_factory=lambda: sys.stdout)

    def run(self) -> int:
        """Run all and print; 1 if a promise is broken, 2 for a kind that is not there."""
        names = list(self.kinds or KINDS)
        unknown = [name for name in names if name not in KINDS]
        if unknown or (self.case is not None and len(names) != 1):
            print(f"--case needs one --kind; possible: {', '.join(KINDS)}", file=self.show)
            return 2
        preload()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
            folder = Path(self.keep or temporary).resolve()
            folder.chmod(0o755) if folder.exists() else folder.mkdir(parents=True)
            return self._run(names, folder)

    def _run(self, names: list[str], folder: Path) -> int:
        self._folder, self._bases = folder, Bases(folder / "bases")
        self._bases.folder.mkdir()
        self._bounds: dict[str, float] = {}
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for name, number in self._numbers(names):
            found = self._judge(name, number)
            counts[name][found.name] += 1
        print(f"\n{'kind':14}" + "".join(f"{verdict:>9}" for verdict in VERDICTS), file=self.show)
        for name in names:
            print(f"{name:14}" + "".join(f"{counts[name][verdict]:9}" for verdict in VERDICTS), file=self.show)
        return int(any(counts[name][verdict] for name in names for verdict in VERDICTS[2:]))

    def _numbers(self, names: list[str]) -> Iterator[tuple[str, int]]:
        if self.case is not None:
            yield names[0], self.case
            return
        for index in range(self.cases):
            yield names[index % len(names)], index // len(names)

    def _judge(self, name: str, number: int) -> Verdict:
        place = Place(self._folder / f"{name}-{number}", self._bases)
        case = KINDS[name](generator(self.seed, name, number), place)
        found = verdict(case, place, Limits(self.seconds), lambda: self._bound(case))
        if not found.good or self.case is not None:
            print(f"{found.name}: {found.why}\n    {case.said}", file=self.show)
            print(
                f"    python -m tests.fuzz --seed {self.seed} --kind {name} --case {number}", file=self.show, flush=True
            )
        if not self.keep:
            shutil.rmtree(place.folder)
        return found

    def _bound(self, case: Case) -> float:
        """What others leave of the undamaged input, in dB."""
        if case.bound is None:
            return 0.0
        if case.like not in self._bounds:
            ending = in_child(case.bound, self._folder / "logs", Limits(3 * self.seconds))
            assert ending.how == "returned", f"no bound of {case.like}: {ending.text}"
            self._bounds[case.like] = float(ending.value)
        return self._bounds[case.like]


def generator(seed: int, kind: str, number: int) -> np.random.Generator:
    """The randomness of one case, which no other case changes."""
    return np.random.default_rng([seed, zlib.crc32(kind.encode()), number])


def preload() -> None:
    """Load once what each child would: it is forked from here. Nothing is run, so that no thread is started."""
    import diffusers
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers

    import quark.commands.folders.evaluate
    import quark.commands.inspect
    import quark.jobs.folders.compared.measure
    import quark.jobs.folders.model_inputs
    import quark.jobs.folders.schemes
    import quark.jobs.run_file
    import quark.onnx.quantizer
    import quark.onnx.search.recovery.search
    import quark.torch.checkpoint.importer
    import quark.torch.flows.from_disk
    import quark.torch.llm.text
    import quark.torch.quantizer  # noqa: F401
    from quark.base.libraries.loading import as_format_error

    with as_format_error(Path()):  # its guard of connections is asked before that of a case
        pass

    torch.set_num_threads(1)
    assert diffusers.FluxTransformer2DModel  # read when first asked for, as these are
    for prefix in ("Llama", "Mixtral", "Bert", "ViT", "T5"):
        getattr(transformers, f"{prefix}PreTrainedModel")
