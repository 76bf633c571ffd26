"""Named ways to draw completions for an evaluation: how, how many, and which measures the source reports of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from explorl.core.plugins import unknown
from explorl.rollout import SamplingParams
from explorl.tasks import Task


@dataclass(frozen=True)
class Protocol:
    """How completions are drawn for an evaluation, and how many."""

    samples: int
    sampling: SamplingParams
    source: str
    measures: tuple[str, ...] = ()
    """What the source's table reports, such as "avg@k", "maj@k", "pass@1"; k is the number of samples."""
    samples_by_task: Mapping[str, int] = field(default_factory=dict)
    """Tasks for which the source draws another number."""

    def samples_for(self, task: Task) -> int:
        """Return the number of samples per problem of this task."""
        return self.samples_by_task.get(task_label(task), self.samples)


_DENG = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=8192)

PROTOCOLS: Mapping[str, Protocol] = {
    "mecklenburg": Protocol(
        5,
        SamplingParams(temperature=0.3, top_p=0.8, top_k=20, repetition_penalty=1.1, max_tokens=1024),
        "Mecklenburg 2025, §4: mean correctness of five samples",
        ("avg@k",),
    ),
    "deng": Protocol(8, _DENG, "Deng et al. 2025, §2.4: temperature 0.6, top-p 0.95"),
    "deng-figure1": Protocol(
        640, _DENG, "Deng et al. 2025, §2.4 and Figure 1: 640 samples, at most 8,192 tokens", ("pass@1", "pass@k")
    ),
    "deng-figure2": Protocol(
        640,
        replace(_DENG, max_tokens=16_384),
        "Deng et al. 2025, §2.5 and Figure 2: at most 16,384 tokens; the number of samples is Figure 1's",
        ("pass@1", "pass@k"),
    ),
    "deng-table3": Protocol(
        64,
        _DENG,
        "Deng et al. 2025, §4.4.1 and Table 3: 64 samples, 128 of AIME24; no token limit is stated, so §2.4's",
        ("pass@1", "pass@k"),
        {"aime24": 128},
    ),
    "deng-table4": Protocol(
        8, _DENG, "Deng et al. 2025, Table 4: avg@8 and maj@8; no sampling is stated, so §2.4's", ("avg@k", "maj@k")
    ),
    "deng-table6": Protocol(
        8,
        _DENG,
        "Deng et al. 2025, Table 6: pass@8, and pass@4 of HumanEval; no sampling is stated, so §2.4's",
        ("pass@k",),
        {"code": 4},
    ),
    "egsw-table1": Protocol(
        1,
        SamplingParams(temperature=0.0, max_tokens=4096),
        "Vanlioglu 2025, Tables 1 and 2: accuracy; no sampling is stated, so greedy within Qwen2.5-Math's context",
        ("avg@k",),
    ),
    "plain": Protocol(
        8, SamplingParams(temperature=1.0, max_tokens=1024), "the policy as it is: temperature 1, nothing cut"
    ),
}


def task_label(task: Task) -> str:
    """Return a task's name in tables and folders: its data set if it has several, such as aime24."""
    dataset = getattr(task, "dataset", None)
    return dataset if isinstance(dataset, str) and dataset else task.name


def protocol(name: str, **changes: Any) -> Protocol:
    """Return a protocol by name; `samples` and any sampling parameter may be changed."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    chosen = PROTOCOLS[name]
    changes = {key: value for key, value in changes.items() if value is not None}
    samples = changes.pop("samples", None)
    if samples is not None:
        if samples < 1:
            raise ValueError(f"samples is {samples}; ask for 1 or more")
        chosen = replace(chosen, samples=samples, samples_by_task={})
    return replace(chosen, sampling=replace(chosen.sampling, **changes))
