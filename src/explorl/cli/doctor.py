"""`explorl doctor`: what works on this machine, found by trying it, and what the commands will therefore do."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from explorl.core.text import clean
from explorl.sandbox import programs

KINDS = ("network", "files", "processes")
"""What programs can be isolated from."""
ISOLATION_ADVICE = (
    "use a kernel and container that permit user namespaces (docker: --security-opt seccomp=unconfined, or --cap-add "
    "SYS_ADMIN), or Linux 5.13 with Landlock; or run everything in a machine that holds nothing of value, and say "
    f"{programs.UNISOLATED}=1"
)


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was tried."""

    area: str
    """"isolation", "judges", "device" or "libraries"."""
    what: str
    works: bool
    found: str
    advice: str = ""
    """What to do where it does not work; nothing where that harms nobody."""


@dataclass
class Diagnosis:
    """All that was tried, and what follows."""

    findings: list[DoctorFinding] = field(default_factory=list)
    consequences: dict[str, str] = field(default_factory=dict)
    """What ``train``, ``eval`` and the tasks will do, by their names."""
    is_safe: bool = False
    """Whether programs that a model wrote run where they can reach nothing."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> Diagnosis:
    """Try everything out; takes some seconds."""
    diagnosis = Diagnosis()
    guarantees = _isolation(diagnosis)
    _judges(diagnosis)
    _device(diagnosis)
    _libraries(diagnosis)
    _programs(diagnosis, guarantees)
    return diagnosis


def _isolation(diagnosis: Diagnosis) -> programs.Guarantees | None:
    """Try each set of layers; the guarantees of the one that programs will run in."""
    if sys.platform != "linux":
        found = f"this is {sys.platform}; the sandbox needs Linux"
        diagnosis.findings.append(
            DoctorFinding("isolation", "sandbox", False, found, "run in a Linux container or machine")
        )
        return None
    for layers in programs.LAYER_SETS:
        name = _named(layers)
        try:
            guarantees = programs.probe(layers)
        except programs.SandboxError as error:
            diagnosis.findings.append(DoctorFinding("isolation", name, False, _short(error)))
            continue
        kept = [kind for kind in KINDS if kind not in guarantees.missing]
        parts = [f"isolated: {', '.join(kept) or 'nothing'}"]
        parts += [f"open: {', '.join(guarantees.missing)}"] if guarantees.missing else []
        parts += [] if guarantees.processes_limited else ["processes and threads are not limited"]
        parts += [] if guarantees.separate_user else ["programs run as this user"]
        diagnosis.findings.append(DoctorFinding("isolation", name, not guarantees.missing, "; ".join(parts)))
    try:
        used = programs.capabilities()
    except programs.SandboxError as error:
        diagnosis.findings.append(DoctorFinding("isolation", "in use", False, _short(error), ISOLATION_ADVICE))
        return None
    diagnosis.is_safe = not used.missing
    advice = "" if diagnosis.is_safe else ISOLATION_ADVICE
    diagnosis.findings.append(DoctorFinding("isolation", "in use", diagnosis.is_safe, _named(used.layers), advice))
    return used


def _named(layers: programs.Layers) -> str:
    return " + ".join(layers) or "limits alone"


def _judges(diagnosis: Diagnosis) -> None:
    """Have the judges judge."""
    from explorl.tasks import get_task
    from explorl.tasks.math.judge import Judge

    def mathematics() -> str:
        with Judge(workers=1, limit=20.0) as judge:
            right, wrong = judge.judge_many([("2k+2", "2(k+1)"), ("2k+2", "2(k+2)")])
            if not right.same or wrong.same:
                raise RuntimeError(f"it says {right.same} of 2(k+1) for 2k+2, and {wrong.same} of 2(k+2)")
        return f"judges in an isolated process, {1000 * wrong.seconds:.0f} ms for a comparison"

    def gym() -> str:
        task = get_task("gym:leg_counting", sizes={"sft": 0, "train": 0, "holdout": 1})
        (problem,) = task.problems("holdout")
        if not task.verify(f"<answer>{problem.data['answer']}</answer>", problem).correct:
            raise RuntimeError("it does not accept its own answer")
        return "scores in an isolated process"

    def code() -> str:
        tested = programs.run_tests("def f(x): return x", "def check(c): assert c(1) == 1", entry_point="f")
        if tested.status != "ok":
            raise RuntimeError(f"a right program ended with {tested.status}: {tested.error}")
        return f"runs programs, {1000 * tested.seconds:.0f} ms for a small one"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what isolation lacks is said above
        _try(diagnosis, "judges", "math", mathematics, "pip install 'math-verify[antlr4_13_2]'")
        if importlib.util.find_spec("reasoning_gym") is None:
            finding = DoctorFinding(
                "judges", "gym", False, "reasoning-gym is not installed", "pip install 'explorl[gym]'"
            )
            diagnosis.findings.append(finding)
        else:
            _try(diagnosis, "judges", "gym", gym, "pip install --upgrade 'explorl[gym]'")
        _try(diagnosis, "judges", "code", code, ISOLATION_ADVICE)


def _device(diagnosis: Diagnosis) -> None:
    """Sample with the engine and take the training pass, in the precision that training will have."""
    import torch

    from explorl.modeling.gpu import kernel_fault
    from explorl.modeling.precision import has_arithmetic

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    if gpu:
        properties = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        found = f"{count} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        diagnosis.findings.append(DoctorFinding("device", "GPU", True, found))
    else:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        advice = "install the torch wheel for your CUDA to use one" if os.path.exists("/dev/nvidia0") else ""
        diagnosis.findings.append(DoctorFinding("device", "GPU", False, f"{built}; {cores} cores will compute", advice))
    half = has_arithmetic(device, torch.bfloat16)
    found = "computes in it" if half else "this processor has no arithmetic for it"
    diagnosis.findings.append(DoctorFinding("device", "bfloat16", half, found))
    fault = kernel_fault(device) if gpu else "no GPU"
    if gpu:
        advice = "pip install triton; it needs a C compiler and Python's headers (apt install gcc python3-dev)"
        diagnosis.findings.append(
            DoctorFinding(
                "device", "kernels", not fault, fault or "Triton compiles and runs them", advice if fault else ""
            )
        )
    engine = _try(
        diagnosis, "device", "engine", lambda: _sampled(device, half), "set rollout.engine to generate; report this"
    )
    passes = _try(
        diagnosis, "device", "training pass", lambda: _trained(device, half), "it steps aside for the model's own"
    )
    where = f"on {device.type}" + (" with Triton kernels in CUDA graphs" if not fault and engine else "")
    precision = "float32, or bfloat16 with model.dtype=bfloat16" if half else "float32"
    sampler = "the engine samples" if engine else "transformers' generate samples"
    steps = "packed sequences without padding" if passes else "TRL's padded batches"
    diagnosis.consequences["train"] = f"{where}; {precision}; {sampler}; {steps}"
    diagnosis.consequences["eval"] = f"{where}; {sampler}"


def _sampled(device: Any, half: bool) -> str:
    import torch

    from explorl.models import tiny_model
    from explorl.rollout import Engine, SamplingParams

    model = tiny_model().to(device)
    engine = Engine(model, dtype=torch.bfloat16 if half else None)
    params = SamplingParams(max_tokens=32, seed=0)
    engine.generate([[1, 2, 3]], n=64, params=params)  # compiles kernels, captures graphs
    begun = time.perf_counter()
    rollouts = engine.generate([[1, 2, 3]], n=64, params=params)
    rollouts.check()
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    return f"samples, {tokens / (time.perf_counter() - begun):,.0f} tokens per second of the tiny policy"


def _trained(device: Any, half: bool) -> str:
    import torch

    from explorl.modeling.passes import choose
    from explorl.models import tiny_model
    from explorl.training.grpo.trl_adapter import add_head

    model = tiny_model().to(device).train()
    add_head(model)
    choice = choose(model, 64, dtype=torch.bfloat16 if half else None)
    if choice.kind == "padded":
        raise RuntimeError(choice.why)
    return f"{choice.kind}, equal to the model's own"


def _libraries(diagnosis: Diagnosis) -> None:
    diagnosis.findings.append(
        DoctorFinding("libraries", "Python", True, f"{platform.python_version()}, {platform.platform(terse=True)}")
    )
    for name in ("explorl", "torch", "transformers", "trl", "peft", "accelerate", "datasets"):
        try:
            diagnosis.findings.append(DoctorFinding("libraries", name, True, version(name)))
        except PackageNotFoundError:
            diagnosis.findings.append(
                DoctorFinding(
                    "libraries", name, False, "not installed", f"pip install {name}" if name != "explorl" else ""
                )
            )


def _programs(diagnosis: Diagnosis, guarantees: programs.Guarantees | None) -> None:
    works = {finding.what: finding.works for finding in diagnosis.findings if finding.area == "judges"}
    if diagnosis.is_safe and guarantees is not None:
        code = f"runs programs shut in by {' and '.join(guarantees.layers)}"
    elif os.environ.get(programs.UNISOLATED) == "1":
        code = f"runs programs without isolation, because {programs.UNISOLATED}=1 says so"
    else:
        code = "refuses to run programs: nothing would isolate them"
    diagnosis.consequences["code"] = code
    isolated = "isolated processes" if diagnosis.is_safe else "processes of their own, which nothing isolates"
    diagnosis.consequences["math"] = f"compares answers in {isolated}" if works["math"] else "does not work"
    diagnosis.consequences["gym:…"] = f"scores answers in {isolated}" if works["gym"] else "does not work"


def _try(diagnosis: Diagnosis, area: str, what: str, action: Callable[[], str], advice: str) -> bool:
    """Do it and write down what came of it; whether it works."""
    try:
        finding = DoctorFinding(area, what, True, action())
    except Exception as error:  # whatever a stranger's machine comes up with
        finding = DoctorFinding(area, what, False, _short(error), advice)
    diagnosis.findings.append(finding)
    return finding.works


def _short(error: BaseException) -> str:
    return clean(" ".join(f"{type(error).__name__}: {error}".split()), 300)
