"""Compare the engine with vLLM and `generate`, from 135 million to 7 billion parameters, for docs/performance.md.

    python benchmarks/engines.py OUT                          # all results missing from OUT; about 15 minutes
    python benchmarks/engines.py OUT --only 135m vllm         # those with both in their names
    python benchmarks/engines.py OUT --show                   # the table of the existing results
    python benchmarks/engines.py OUT --vllm-path FOLDER       # where vLLM is, if it is not installed

Each contender runs in its own process and writes OUT/<name>.json, and its output to OUT/<name>.log. If one fails, the
others continue, and it is reported at the end; a second run measures only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Load:
    """The load that all contenders sample: a number of requests, 16 per prompt of 64 tokens."""

    name: str
    shape: str
    requests: int
    tokens: str
    """Tokens per request: a number, or the name of a distribution."""
    repeats: int = 3
    generate: bool = False
    """Whether to run `generate` too; with uneven or long completions it takes minutes."""

    @property
    def key(self) -> str:
        return f"{self.requests}x{self.tokens}"


LOADS = (
    Load("135m-equal", "smollm2-135m", 512, "256", generate=True),
    Load("135m-skewed", "smollm2-135m", 512, "skewed"),
    Load("135m-long", "smollm2-135m", 64, "1024", generate=True),
    Load("1.5b-lognormal", "qwen2.5-1.5b", 256, "lognormal", repeats=1),
    Load("7b-equal", "qwen2.5-7b", 512, "1024", repeats=1),
)


def contenders(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Return the name and command of each contender."""
    shapes = dict.fromkeys(load.shape for load in LOADS)
    common = ["--device", options.device, "--dtype", options.dtype]
    for load in LOADS:
        lengths = ["--max-tokens", load.tokens] if load.tokens.isdigit() else ["--lengths", load.tokens]
        command = ["rollout.py", "--shape", load.shape, "--requests", str(load.requests), *lengths, *common]
        yield f"{load.name}-engine", [*command, "--repeats", str(load.repeats), "--skip", "generate", "static", "mixed"]
        if load.generate:
            yield f"{load.name}-generate", [*command, "--repeats", "1", "--skip", "static", "engine", "mixed"]
    for tuned in (False, True):
        for shape in shapes:
            loads = [load for load in LOADS if load.shape == shape]
            command = ["rollout_vllm.py", *(load.key for load in loads), "--shape", shape, "--dtype", options.dtype]
            command += ["--repeats", str(min(2, *(load.repeats for load in loads), 2)), *(["--tuned"] if tuned else [])]
            yield f"{shape}-vllm{'-tuned' if tuned else ''}", command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="only names with all of these")
    parser.add_argument("--show", action="store_true", help="print the table and measure nothing")
    parser.add_argument("--vllm-path", type=Path, help="folder that contains vLLM; it comes first on the path")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [] if options.show else [name for name, command in contenders(options) if not run(name, command, options)]
    print("\n".join(table(options.out)))
    if failed:
        print(f"failed: {', '.join(failed)}; their logs are in {options.out}", file=sys.stderr)
    return int(bool(failed))


def run(name: str, command: list[str], options: argparse.Namespace) -> bool:
    """Run a contender and return whether it wrote a result."""
    file = options.out / f"{name}.json"
    if file.exists() or not all(text in name for text in options.only):
        return True
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    if options.vllm_path is not None and "vllm" in name:
        paths.insert(0, str(options.vllm_path))
    begun = time.monotonic()
    unfinished = file.with_suffix(".part")
    with file.with_suffix(".log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:], "--json", str(unfinished)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            check=False,
        )
    if ended.returncode == 0:
        unfinished.rename(file)
    print(f"{name}: {'done' if ended.returncode == 0 else 'failed'} in {time.monotonic() - begun:.0f} s", flush=True)
    return ended.returncode == 0


def table(out: Path) -> Iterator[str]:
    """Return the tokens per second of each load, and the engine's share of the memory roofline and of its plan."""
    columns = ("engine, tokens/s", "of the roofline", "peak / planned MiB", "`generate`")
    columns += ("vLLM", "with log π", "tuned", "with log π")
    yield f"| load | {' | '.join(columns)} |"
    yield f"| --- |{' ---: |' * len(columns)}"
    for load in LOADS:
        engine, generate = (_read(out / f"{load.name}-{who}.json") for who in ("engine", "generate"))
        cells = ["–", "–", "–", "–"]
        if engine:
            (own,) = engine["results"]
            cells[0] = f"{own['tokens_per_second']:,.0f}"
            cells[1] = f"{engine['roofline']['fraction']:.0%}".replace("%", " %") if "roofline" in engine else "–"
            if own["peak_bytes"]:
                cells[2] = f"{own['peak_bytes'] / 2**20:,.0f} / {engine['planned_bytes'] / 2**20:,.0f}"
        if generate:
            cells[3] = f"{generate['results'][0]['tokens_per_second']:,.0f}"
        for tuned in ("", "-tuned"):
            measured = (_read(out / f"{load.shape}-vllm{tuned}.json") or {"loads": {}})["loads"].get(load.key)
            for mode in ("plain", "logprobs"):
                cells.append(f"{measured[mode]['tokens_per_second']:,.0f}" if measured else "–")
        yield f"| {load.name}: {load.shape}, {load.requests} × {load.tokens} | {' | '.join(cells)} |"


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


if __name__ == "__main__":
    sys.exit(main())
