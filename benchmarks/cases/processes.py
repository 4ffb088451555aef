"""Two processes of torchrun against one: a checkpoint streamed with GPTQ, and one from file to file.

    path = sum over the stretches between two meetings of the most CPU seconds that a process takes there

That is what the processes would take on the clock, each on a core of its own: other work on the machine lengthens the
clock, and takes nothing from this. Paths are those of the larger model minus those of the smaller: starting and reading
config.json fall out, so that ratios hold for models of any depth.

* `gptq.path`, `mxfp4.path`: of two processes / CPU seconds of one; at most 1 / 1.7.
* `gptq.wall`, `mxfp4.wall`: the clock of two / of one, which says something where two cores are free; `load` is how
  many processes wanted to run in the last minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cases.file2file import checkpoint

ROOT = Path(__file__).parents[2]
RUNS = 2
INTERMEDIATE = 5632
LAYERS = {"gptq": (1, 2), "mxfp4": (2, 6)}
TOKENS = (4, 512)


def as_rank(job: str, source: Path, output: Path) -> None:
    """Do a job as one of the processes that torchrun started; print what it took between meetings."""
    from dataclasses import replace

    import torch

    from quark.torch import LLMTemplate, ModelQuantizer, processes
    from quark.torch.calibration import distributed
    from quark.torch.checkpoint.opened import OpenedFolder
    from quark.torch.config.algo_configs import GPTQConfig
    from quark.torch.flows.from_disk import stream

    torch.set_num_threads(1)
    folder = OpenedFolder(source)
    assert folder.skeleton is not None  # transformers is imported before the clock starts
    template, meet = LLMTemplate.get("auto"), distributed.collective
    marks = list[float]()

    def marked(action: Any) -> None:
        marks.append(time.process_time())
        meet(action)

    with processes():
        distributed.wait()
        distributed.collective = marked
        marks.append(time.process_time())
        wall = time.perf_counter()
        if job == "gptq":
            random = torch.Generator().manual_seed(0)
            data = [torch.randint(0, 1024, (1, TOKENS[1]), generator=random) for _ in range(TOKENS[0])]
            config = replace(template.get_config("uint4_wo_128"), algo_config=[GPTQConfig()])
            stream(config, folder, output, data)
        else:
            ModelQuantizer(template.get_config(job)).direct_quantize_checkpoint(source, output)
        wall = time.perf_counter() - wall
        marks.append(time.process_time())
    sys.stdout.write(json.dumps({"wall": wall, "marks": marks}) + "\n")


def measure(count: int, job: str, source: Path, scratch: Path) -> dict[str, float]:
    """The path and the clock of so many processes."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += ["--log-dir", f"{place}/logs", "--redirects", "3", "--module", "benchmarks.cases.processes"]
        done = subprocess.run([*command, job, str(source), f"{place}/out"], cwd=ROOT, capture_output=True, text=True)
        logs = sorted(Path(place).glob("logs/**/*"))
        if done.returncode:
            raise RuntimeError("\n".join(log.read_text() for log in logs if log.name == "stderr.log"))
        rows = [json.loads(log.read_text()) for log in logs if log.name == "stdout.log"]
    assert len(rows) == count and len({len(row["marks"]) for row in rows}) == 1
    stretches = [[end - start for start, end in zip(row["marks"], row["marks"][1:], strict=False)] for row in rows]
    return {"path": sum(map(max, zip(*stretches, strict=True))), "wall": max(row["wall"] for row in rows)}


def main() -> None:
    if len(sys.argv) > 1:
        as_rank(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
        return
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        for layers in sorted({layers for both in LAYERS.values() for layers in both}):
            checkpoint(scratch / str(layers), layers, INTERMEDIATE)
        for job, both in LAYERS.items():
            # They take turns, so that a busy moment hits all of them.
            runs = [
                [measure(count, job, scratch / str(layers), scratch) for count in (1, 2) for layers in both]
                for _ in range(RUNS)
            ]
            least = [{key: min(run[key] for run in same) for key in same[0]} for same in zip(*runs, strict=True)]
            of_one, of_two = ({key: more[key] - less[key] for key in less} for less, more in (least[:2], least[2:]))
            result[job] = {key: of_two[key] / of_one[key] for key in of_one} | {"seconds": of_one["path"]}
    sys.stdout.write(json.dumps({**result, "load": os.getloadavg()[0]}) + "\n")


if __name__ == "__main__":
    main()
