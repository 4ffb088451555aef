"""Run the rows in processes of their own, measure what they wrote, print a table."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from benchmarks.real_language_models import __doc__ as meaning
from benchmarks.real_language_models.bench import ROOT, Bench
from benchmarks.real_language_models.encoders import EncoderBench
from benchmarks.real_language_models.models import ENCODERS, WHEELS
from benchmarks.tables import console


def main() -> None:
    """Print the table; results of rows that ran before are kept in PLACE/results.json, and shown with them."""
    parser = argparse.ArgumentParser(description=meaning, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="patterns of names of rows; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--model", choices=[*WHEELS], default="smollm2")
    parser.add_argument("--place", type=Path, default=ROOT / "build" / "real-language-models", help="where models go")
    args = parser.parse_args()
    patterns = args.rows or ["*"]
    kind = EncoderBench if args.model in ENCODERS else Bench
    chosen = [row for row in kind.rows.values() if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]
    if args.list:
        print("\n".join(row.name for row in chosen))
        return
    place: Path = args.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    bench, file = kind(args.model, place), place / f"results-{args.model}.json"
    table = Table("row", *bench.columns, title=f"{args.model}: {bench.title}")
    for row in chosen:
        results = json.loads(file.read_text()) if file.exists() else {}
        results[row.name] = bench.run(row)
        file.write_text(json.dumps(results, indent=1))
        found = results[row.name]
        cells = [escape(found["error"])] if "error" in found else bench.cells(found)
        table.add_row(row.name, *cells)
        print(row.name, *cells, file=sys.stderr, flush=True)
    console().print(table)


if __name__ == "__main__":
    main()
