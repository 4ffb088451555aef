"""Cases: a job and a moment. After the kill the output is absent, old or new; after a second run nothing else is left.

Each event around a rename is tried with SIGKILL, however many there are. The other cases have one of ENDS in turn: a
signal, or a disk that fills. Of the signals half come before a file event, each of which has its turn as far as the
count allows; half at any moment. What a command that can say so leaves, it names.
"""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests.kill.jobs import JOBS, Action, Job, make_inputs
from tests.kill.server import REFUSED, Disk, End, Moment, fork, load_modules

Files = Mapping[str, bytes]
NEVER = Moment()
ENDS = (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, None, signal.SIGINT)
"""How cases end, in turn; None: by a disk that fills."""
PAGE = 4096
"""Bytes that a file of a disk takes at least, and of which it takes a multiple."""


@dataclass(frozen=True)
class Undisturbed:
    """What a job does when nobody kills it: the files before and after, its number of changes, its time."""

    before: Files
    after: Files
    end: End


class Workshop:
    """Folders of inputs and of the case at hand, below a root."""

    def __init__(self, root: Path) -> None:
        self.root, self.inputs, self.folder, self.log = root, root / "inputs", root / "case", root / "log"
        self.inputs.mkdir()
        self.disk = Disk(self.folder)
        # In a child: the server itself must stay without the threads that libraries start.
        self._fork(lambda inputs, folder: make_inputs(inputs), NEVER)
        load_modules(self.log)

    def _fork(self, action: Action, moment: Moment, room: int = 0) -> End:
        def run() -> None:
            if room:
                self.disk.limit(room)
            action(self.inputs, self.folder)

        end = fork(run, self.folder, moment, self.log)
        if end.code not in codes_of(moment):
            raise RuntimeError(f"A job ended by itself, with {end.code}:\n{self.log.read_text()}")
        return end

    def learn(self, job: Job) -> Undisturbed:
        """Run the job as it is."""
        self._put({})
        if job.old:
            self._fork(job.old, NEVER)
        before = files_of(self.folder)
        self._fork(job.run, NEVER)
        load_modules(self.log)
        self._put(before)
        end = self._fork(job.run, NEVER)
        return Undisturbed(before, files_of(self.folder), end)

    def kill(self, job: Job, known: Undisturbed, moment: Moment) -> tuple[str, list[str]]:
        """Kill the job, and run it again; what lay there in between ("absent", "old" or "new"), and what is wrong."""
        share = 0.0 if moment.room is None else max(PAGE, moment.room * disk_size(known.after))
        room = int(disk_size(known.before) + share) if share else 0
        there = self._around()
        self._put(known.before, room)
        try:
            end = self._fork(job.run, moment, room)
            left = files_of(self.folder)
            state, wrong = judge(job, left, known)
            if end.code not in (0, -signal.SIGKILL):
                wrong += unsaid(job, end.code, {*left, *(self._around() - there)}, known, self.log.read_text())
            self.disk.grow()
            self._fork(job.run, NEVER)
        except RuntimeError as error:
            return "broken", [str(error)]
        again = files_of(self.folder)
        names = sorted({name for name in {*again, *known.after} if again.get(name) != known.after.get(name)})
        if names:
            wrong.append(
                f"after the second run these differ: {names[:6]}; after the kill there were {sorted(left)[:12]}"
            )
        return state, wrong

    def _around(self) -> set[str]:
        """Names of what lies around the folder, where the system's temporary files are."""
        return {path.name for path in self.root.iterdir()} - {self.folder.name}

    def _put(self, files: Files, room: int = 0) -> None:
        self.disk.clear()
        self.folder.mkdir()
        if room:
            self.disk.make(room)
        for name, content in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def files_of(folder: Path) -> dict[str, bytes]:
    """Path below the folder -> content; folders that are empty are there too."""
    paths = [path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir())]
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in paths}


def judge(job: Job, left: Files, known: Undisturbed) -> tuple[str, list[str]]:
    """Which output lies at the names of a job's outputs, and what is wrong with it."""
    states, wrong = [], []
    for name in job.outputs:
        found = output(left, name)
        choices = {"absent": {}, "old": output(known.before, name), "new": output(known.after, name)}
        state = next((state for state, whole in choices.items() if found == whole), "broken")
        if state == "broken":
            wrong.append(f"{name} is neither absent, old nor new: {sorted(found)}")
        if state == "absent" and choices["old"]:
            wrong.append(f"{name} was there before, and is gone")
        states.append(state)
    return max(states, key=["absent", "old", "new", "broken"].index), wrong


def codes_of(moment: Moment) -> tuple[int, ...]:
    """The codes with which a job may end: 0, where it was done before."""
    if moment == NEVER:
        return (0,)
    if moment.room is not None:
        return 0, REFUSED
    return 0, -moment.signal, 128 + moment.signal


def disk_size(files: Files) -> int:
    """Bytes that files take on a disk."""
    return sum(-(-len(content) // PAGE) * PAGE for content in files.values())


def unsaid(job: Job, code: int, left: Iterable[str], known: Undisturbed, said: str) -> list[str]:
    """What is wrong with how a job ended that could still say something.

    Args:
        job, code: Which ended, and how.
        left: Names of all files, and of what is new around the folder.
        known: See `Undisturbed`.
        said: What it printed.
    """
    if code < 0:  # by the signal itself, which only commands meet
        return [f"a command ended by signal {-code} itself"] if job.is_command and {*left} != {*known.before} else []
    wrong = []
    lines = [line for line in said.splitlines() if line.startswith("quark: ")]
    if len(lines) != 1 and job.is_command:
        wrong.append(f"it ended with {code} and the lines {lines}")
    if any("Unexpected " in line for line in lines) or "Traceback" in said:
        wrong.append(f"it ended with {code} and said {said[-300:]!r}")
    beside = _tops(left) - _tops(known.before) - _tops(known.after)
    unnamed = sorted(name for name in beside if name not in said)
    return wrong + [f"{name} is left, and nothing says so: {said[-300:]!r}" for name in unnamed]


def _tops(names: Iterable[str]) -> set[str]:
    return {name.partition("/")[0] for name in names}


def output(files: Files, name: str) -> dict[str, bytes]:
    """The files of an output: itself, what is in it, or the weights that it names."""
    found = {key: content for key, content in files.items() if key == name or key.startswith(f"{name}/")}
    if name.endswith(".onnx") and name in found:
        tensors = onnx.load_model_from_string(found[name]).graph.initializer
        entries = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
        found |= {entry: files.get(entry, b"") for entry in entries}
    return found


def moments(known: Mapping[str, Undisturbed], count: int, seed: int) -> Iterator[tuple[str, Moment]]:
    """Names of jobs and how to end them, all jobs in turn: at each event around a rename, whatever the count is."""
    dice = random.Random(seed)
    always = {name: job.end.around_renames() for name, job in known.items()}
    for name, near in always.items():
        yield from ((name, Moment(event=event)) for event in near)
    count = max(0, count - sum(map(len, always.values())))
    events = {name: sorted({*range(1, job.end.events + 1)} - {*always[name]}) for name, job in known.items()}
    for left in events.values():
        dice.shuffle(left)
    for number in range(count):
        turn, place = divmod(number, len(known))
        # Another one for each job in a turn, and for a job in each turn.
        end, name = ENDS[(turn + place) % len(ENDS)], list(known)[place]
        if end is None:
            yield name, Moment(room=dice.uniform(0, 1.2))
        elif turn % 2 == 0 and events[name]:
            yield name, Moment(event=events[name].pop(), signal=end)
        else:
            yield name, Moment(seconds=dice.uniform(0, 1.05 * known[name].end.seconds), signal=end)


def run_cases(root: Path, count: int, seed: int, only: Sequence[str]) -> int:
    """Kill so many times, and print what came of it; 1 where anything is wrong."""
    workshop = Workshop(root)
    jobs = {job.name: job for job in JOBS if not only or any(word in job.name for word in only)}
    known = {name: workshop.learn(job) for name, job in jobs.items()}
    states = {name: Counter[str]() for name in jobs}
    failures = 0
    how: Counter[str] = Counter()
    for name, moment in moments(known, count, seed):
        state, wrong = workshop.kill(jobs[name], known[name], moment)
        states[name][state] += 1
        how["full disk" if moment.room is not None else moment.signal.name] += 1
        failures += bool(wrong)
        for line in wrong:
            sys.stdout.write(f"WRONG: {name}, ended {moment}: {line}\n")
            sys.stdout.flush()
    workshop.disk.clear()
    for name, found in states.items():
        end = known[name].end
        shown = ", ".join(f"{found[state]} {state}" for state in ("absent", "old", "new", "broken") if found[state])
        sys.stdout.write(f"{name}: {end.events} file events in {end.seconds:.2f} s; kills: {shown}\n")
    sys.stdout.write(f"{', '.join(f'{count} by {end}' for end, count in how.items())}\n")
    sys.stdout.write(f"{sum(map(Counter.total, states.values()))} kills, {failures} wrong\n")
    return int(failures > 0)
