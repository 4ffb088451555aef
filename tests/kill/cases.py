"""Cases: a job and a moment. After the kill the output is absent, old or new; after a second run nothing else is left.

Each event around a rename is tried, however many there are. Of the other kills half come before a file event, each of
which has its turn as far as the count allows; half at any moment.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from tests.kill.jobs import JOBS, Action, Job, make_inputs
from tests.kill.server import End, Moment, fork, load_modules

Files = Mapping[str, bytes]
NEVER = Moment()


@dataclass(frozen=True)
class Undisturbed:
    """What a job does when nobody kills it: the files before and after, its number of changes, its time."""

    before: Files
    after: Files
    end: End


class Workshop:
    """Folders of inputs and of the case at hand, below a root."""

    def __init__(self, root: Path) -> None:
        self.inputs, self.folder, self.log = root / "inputs", root / "case", root / "log"
        self.inputs.mkdir()
        # In a child: the server itself must stay without the threads that libraries start.
        self._fork(lambda inputs, folder: make_inputs(inputs), NEVER)
        load_modules(self.log)

    def _fork(self, action: Action, moment: Moment) -> End:
        end = fork(lambda: action(self.inputs, self.folder), self.folder, moment, self.log)
        if end.code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"A job failed by itself:\n{self.log.read_text()}")
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
        self._put(known.before)
        try:
            self._fork(job.run, moment)
            left = files_of(self.folder)
            state, wrong = judge(job, left, known)
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

    def _put(self, files: Files) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
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


def output(files: Files, name: str) -> dict[str, bytes]:
    """The files of an output: itself, what is in it, or the weights that it names."""
    found = {key: content for key, content in files.items() if key == name or key.startswith(f"{name}/")}
    if name.endswith(".onnx") and name in found:
        tensors = onnx.load_model_from_string(found[name]).graph.initializer
        entries = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
        found |= {entry: files.get(entry, b"") for entry in entries}
    return found


def moments(known: Mapping[str, Undisturbed], count: int, seed: int) -> Iterator[tuple[str, Moment]]:
    """Names of jobs and when to kill them, all jobs in turn: at each event around a rename, whatever the count is."""
    dice = random.Random(seed)
    always = {name: job.end.around_renames() for name, job in known.items()}
    for name, near in always.items():
        yield from ((name, Moment(event=event)) for event in near)
    count = max(0, count - sum(map(len, always.values())))
    events = {name: sorted({*range(1, job.end.events + 1)} - {*always[name]}) for name, job in known.items()}
    for left in events.values():
        dice.shuffle(left)
    for turn in range(-(-count // len(known))):
        for name in list(known)[: count - turn * len(known)]:
            if turn % 2 == 0 and events[name]:
                yield name, Moment(event=events[name].pop())
            else:
                yield name, Moment(seconds=dice.uniform(0, 1.05 * known[name].end.seconds))


def run_cases(root: Path, count: int, seed: int, only: Sequence[str]) -> int:
    """Kill so many times, and print what came of it; 1 where anything is wrong."""
    workshop = Workshop(root)
    jobs = {job.name: job for job in JOBS if not only or any(word in job.name for word in only)}
    known = {name: workshop.learn(job) for name, job in jobs.items()}
    states = {name: Counter[str]() for name in jobs}
    failures = 0
    for name, moment in moments(known, count, seed):
        state, wrong = workshop.kill(jobs[name], known[name], moment)
        states[name][state] += 1
        failures += bool(wrong)
        for line in wrong:
            sys.stdout.write(f"WRONG: {name}, killed {moment}: {line}\n")
    for name, found in states.items():
        end = known[name].end
        shown = ", ".join(f"{found[state]} {state}" for state in ("absent", "old", "new", "broken") if found[state])
        sys.stdout.write(f"{name}: {end.events} file events in {end.seconds:.2f} s; kills: {shown}\n")
    sys.stdout.write(f"{sum(map(Counter.total, states.values()))} kills, {failures} wrong\n")
    return int(failures > 0)
