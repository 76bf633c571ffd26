"""The logits processor under both of vLLM's interfaces, without vLLM: its calls are made by hand, in its order."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout.backends import vllm_processor
from explorl.rollout.backends.chain import Chain, Chains
from explorl.rollout.backends.vllm_processor import ExplorlLogitsProcessor, checked

CONFIG = SimpleNamespace(model_config=SimpleNamespace(seed=0))


def request(temperature: float = 1.0, n: int = 1, **given: Any) -> SimpleNamespace:
    own = {name: given.pop(name) for name in ("top_p", "top_k", "min_p") if name in given}
    extra = {f"explorl_{name}": value for name, value in given.items()} or None
    return SimpleNamespace(
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, **own}, temperature=temperature, n=n, extra_args=extra
    )


def behind(processor: Any, logits: torch.Tensor, rows: list[tuple[Any, list[int]]]) -> torch.Tensor:
    """V1: temperature, then the processor."""
    added = [(place, params, [1], tokens) for place, (params, tokens) in enumerate(rows)]
    processor.update_state(SimpleNamespace(added=added, removed=[], moved=[]))
    warm = torch.tensor([params.temperature for params, _ in rows])
    return processor.apply(logits / torch.where(warm == 0, 1.0, warm)[:, None])


def before(processor: Any, logits: torch.Tensor, rows: list[tuple[Any, list[int]]], prompt: int = 4) -> torch.Tensor:
    """Model Runner V2: the processor, then temperature. Slots are in another order than rows."""
    slots = list(reversed(range(len(rows))))
    needed = [processor.add_request(slot, params) for slot, (params, _) in zip(slots, rows, strict=True)]
    processor.apply_staged_writes()
    context = SimpleNamespace(
        idx_mapping_np=np.array(slots),
        expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
        pos=torch.tensor([prompt - 1 + len(tokens) for _, tokens in rows]),
    )
    if any(needed):  # vLLM calls it only then
        logits = processor.apply(logits, context)
    warm = torch.tensor([params.temperature for params, _ in rows])
    return logits / torch.where(warm == 0, 1.0, warm)[:, None]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> ExplorlLogitsProcessor:
    """For V1, whose helper for its bookkeeping stands in for itself."""

    def process_dict_updates(entries: dict[int, Any], update: Any, new_state: Any) -> bool:
        for place, params, prompt, tokens in update.added:
            state = new_state(params, prompt, tokens)
            entries.pop(place, None)
            if state is not None:
                entries[place] = state
        for place in update.removed:
            entries.pop(place, None)
        return True

    name = "vllm.v1.sample.logits_processor.builtin"
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), SimpleNamespace(__path__=[]))
    sys.modules[name].process_dict_updates = process_dict_updates  # type: ignore[attr-defined]
    return ExplorlLogitsProcessor(CONFIG, torch.device("cpu"), False)


@pytest.fixture
def two() -> ExplorlLogitsProcessor:
    states = SimpleNamespace(
        device=torch.device("cpu"), max_num_reqs=8, prompt_len=SimpleNamespace(gpu=torch.full((8,), 4))
    )
    return ExplorlLogitsProcessor(CONFIG, states)


ROWS = [
    (request(1.4, bottom_p=0.7), [3, 3]),
    (request(0.6, bottom_p=0.5), [1]),
    (request(1.0), [2, 2, 2]),
    (request(1.0, bottom_p=0.4, bottom_p_frequency=0.5, key=77), [4]),
    (request(1.0, temperatures=[2.0, 5.0], min_p=0.0), [4, 4, 4]),
    (request(0.0, bottom_p=0.5), []),
]


def test_both_interfaces_leave_the_same_distribution(one: Any, two: Any) -> None:
    logits = torch.randn(len(ROWS), 60, generator=torch.Generator().manual_seed(0))
    first, second = behind(one, logits.clone(), ROWS), before(two, logits.clone(), ROWS)
    assert torch.equal(first.isfinite(), second.isfinite())
    torch.testing.assert_close(torch.softmax(first, -1), torch.softmax(second, -1), atol=1e-6, rtol=1e-5)
    assert first[:2].isinf().sum(1).min() > 0
    torch.testing.assert_close(first[2], logits[2])  # nobody asked
    torch.testing.assert_close(first[4], logits[4] / 5.0)  # the last temperature holds on
    torch.testing.assert_close(first[5].argmax(), logits[5].argmax())  # greedy


def test_the_coin_goes_by_the_request_and_the_position(one: Any, two: Any) -> None:
    params = request(bottom_p=0.4, bottom_p_frequency=0.5, key=5)
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(1))
    wanted = Chains.of([Chain(bottom_p=0.4, bottom_p_frequency=0.5, key=5)]).applied
    sides = set()
    for position in range(12):
        tokens = [9] * position
        acts = bool(wanted(torch.tensor([position]))[0])
        assert bool(behind(one, logits.clone(), [(params, tokens)]).isinf().any()) == acts
        assert bool(before(two, logits.clone(), [(params, tokens)]).isinf().any()) == acts
        sides.add(acts)
    assert sides == {True, False}


def test_without_arguments_of_ours_it_does_nothing(one: Any, two: Any) -> None:
    logits = torch.randn(2, 9)
    plain = SimpleNamespace(**{**vars(request()), "extra_args": {"somebody": "else"}, "top_p": 0.3, "top_k": 5})
    for params in (request(), plain):
        assert checked(params) is None
        assert two.add_request(0, params) is False
    kept = logits.clone()
    assert behind(one, logits, [(plain, []), (request(), [])]).equal(kept)
    assert one.apply(logits) is logits
    assert two.apply(logits, None) is logits


def test_a_slot_is_taken_over_by_a_request_that_asks_for_nothing(two: Any) -> None:
    logits = torch.randn(1, 40)
    assert before(two, logits.clone(), [(request(bottom_p=0.5), [])]).isinf().any()
    assert before(two, logits.clone(), [(request(), [])]).equal(logits)


def test_requests_without_a_key_throw_coins_that_all_workers_agree_on() -> None:
    workers = [ExplorlLogitsProcessor(CONFIG, torch.device("cpu"), False) for _ in range(2)]
    params = request(bottom_p=0.5, bottom_p_frequency=0.5)
    keys = [[worker._new(params, [])[0].key for _ in range(3)] for worker in workers]  # type: ignore[index]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (request(bottom_p=0.9, top_p=0.9), "explorl_top_p"),
        (request(bottom_p=0.9, top_k=5), "top_k is 5"),
        (request(bottom_p=0.9, min_p=0.1), "min_p is 0.1"),
        (request(1.5, temperatures=[1.0]), "temperature is 1.5 together with explorl_temperatures"),
        (request(n=4, bottom_p=0.9, key=3), "n is 4 together with explorl_key"),
        (request(bottom_p=2), "explorl_bottom_p is 2"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_when_it_comes(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match="explorl_") as error:
        ExplorlLogitsProcessor.validate_params(params)
    assert message in str(error.value)


def test_it_is_registered_and_nothing_here_imports_vllm() -> None:
    from importlib.metadata import entry_points

    target = "explorl.rollout.backends.vllm_processor:ExplorlLogitsProcessor"
    names = {point.value for point in entry_points(group="vllm.logits_processors")}
    assert not names or target in names
    for name in ("vllm", "vllm_requests"):
        importlib.import_module(f"explorl.rollout.backends.{name}")
    assert "vllm" not in sys.modules
    assert vllm_processor.ExplorlLogitsProcessor.__name__ == target.split(":")[1]
