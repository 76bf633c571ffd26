"""The trainer's steps on verl's driver, one by one, with a queue in memory in place of TransferQueue; no Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl.protocol")
pytestmark = pytest.mark.scale

import verl.trainer.ppo.v1.trainer_base as trainer_base  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

import explorl.integrations.verl.trainer as ours  # noqa: E402
from explorl.integrations.verl.settings import read_settings  # noqa: E402
from explorl.strategies import grpo_advantages  # noqa: E402

LENGTHS = (3, 5, 2, 4, 1)
KEYS = ["b_0_0", "a_1_0", "a_0_0", "b_1_0", "pad_0_0"]
SCORES = (1.0, 0.0, 1.0, 0.25, 0.0)
EOS = 1


class Queue:
    """TransferQueue's calls, on columns in memory."""

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {}
        self.puts: list[list[str]] = []

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> KVBatchMeta:
        self.puts.append(sorted(map(str, fields.keys())))
        self.columns |= dict(fields.items())
        return batch(list(self.columns), keys)

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any) -> TensorDict:
        columns = TensorDict({}, batch_size=len(KEYS))
        for name in select_fields:
            if name in self.columns and isinstance(self.columns[name], list):
                tu.assign_non_tensor_stack(columns, name, self.columns[name])
            elif name in self.columns:
                columns[name] = self.columns[name]
        return columns


def batch(fields: list[str] | None = None, keys: Any = KEYS) -> KVBatchMeta:
    tags = [{"is_padding": key.startswith("pad")} for key in KEYS]
    return KVBatchMeta(keys=list(keys), tags=tags, partition_id="train", fields=fields, extra_info={})


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def queue() -> Queue:
    generator = torch.Generator().manual_seed(0)
    held = Queue()
    scores = [torch.cat([torch.zeros(n - 1), torch.tensor([score])]) for n, score in zip(LENGTHS, SCORES, strict=True)]
    held.columns = {
        "uid": [key.rsplit("_", 2)[0] for key in KEYS],
        "raw_prompt": [[{"role": "user", "content": key[0]}] for key in KEYS],
        "extra_fields": [{"reward_extra_info": {"acc": float(score == 1.0)}} for score in SCORES],
        "responses": nested([torch.tensor([7] * (n - 1) + [EOS if n != 5 else 7]) for n in LENGTHS]),
        "response_mask": nested([torch.full((n,), int(n > 1)) for n in LENGTHS]),
        "rm_scores": nested(scores),
        "old_log_probs": nested([-torch.rand(n, generator=generator) for n in LENGTHS]),
        "entropy": nested([torch.rand(n, generator=generator) for n in LENGTHS]),
    }
    return held


def trainer(strategies: list[Any], held: Queue, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `ExplorlTrainer` before any worker was started."""
    config = OmegaConf.create(
        {
            "explorl": {"strategies": strategies, "correct": "acc", "run": False},
            "trainer": {"default_local_dir": "."},
            "algorithm": {
                "adv_estimator": "explorl_grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False,
                "rollout_correction": None,
            },
            "actor_rollout_ref": {
                "rollout": {
                    "n": 2, "temperature": 1.0, "response_length": 5,
                    "agent": {"default_agent_loop": "single_turn_agent"},
                },
            },
        }
    )  # fmt: skip
    monkeypatch.setattr(trainer_base, "tq", held)
    monkeypatch.setattr(ours, "tq", held)
    made = object.__new__(ours.ExplorlTrainer)
    made.config, made.global_steps, made.trainer_mode = config, 1, "sync"
    made._prepare(read_settings(OmegaConf.to_container(config)))  # type: ignore[arg-type]
    made.tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=0)
    made._end_tokens = [EOS, 0]
    made._submitted_prompts = ["a", "b"]
    return made


def padded(held: Queue, name: str) -> torch.Tensor:
    return held.columns[name].to_padded_tensor(0.0)


def test_without_strategies_only_verls_own_columns_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    held = queue()
    trainer([], held, monkeypatch)._compute_advantage(batch(), {})
    assert held.puts == [["advantages", "returns"]]


def test_strategies_act_on_the_real_rows_and_empty_ones_learn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held, metrics = queue(), dict[str, Any]()
    own = trainer([{"overlong_penalty": {"cache": 2}}, "mask_truncated", {"egsw": {"alpha": 0.3}}], held, monkeypatch)
    actual = own._compute_advantage(batch(), metrics)
    assert {"explorl/weights", "explorl/kl_weights", "advantages"} <= set(actual.fields)
    # of five tokens at most, the second row has five and the fourth four: 1 and 1/2 off, before rewards are normalised
    rewards = torch.tensor([SCORES[0], SCORES[1] - 1.0, SCORES[2], SCORES[3] - 0.5])
    expected = grpo_advantages(rewards, torch.tensor([0, 1, 1, 0]))
    mask = padded(held, "response_mask")
    torch.testing.assert_close(padded(held, "advantages")[:4], expected.unsqueeze(1) * mask[:4])
    assert padded(held, "advantages")[4].abs().sum() == 0
    assert padded(held, "explorl/weights")[4, 0] == 1
    assert metrics["explorl/correct"] == 0.5
    assert metrics["strategy/overlong_penalty/reward_rows"] == 2


def test_tokens_taken_out_are_out_of_the_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = queue()
    own = trainer(["mask_truncated"], held, monkeypatch)
    before = padded(held, "response_mask").clone()
    made = own._compute_advantage(batch(), {})
    during: dict[str, torch.Tensor] = {}

    def update(self: Any, batch: Any, metrics: Any) -> Any:
        during.update({name: padded(held, name).clone() for name in ("response_mask", "loss_mask")})
        assert batch.extra_info["explorl_step"] == 0
        return batch

    monkeypatch.setattr(ours.PPOTrainerSync, "_update_actor", update)
    own._update_actor(made, {})
    expected = before.clone()
    expected[1] = 0  # it did not end
    for columns in during.values():
        torch.testing.assert_close(columns, expected)
    torch.testing.assert_close(padded(held, "response_mask"), before)


def test_without_strategies_a_run_is_kept_whatever_the_agent_loop_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = queue()
    del held.columns["entropy"]
    own = trainer([], held, monkeypatch)
    recorded: list[dict[str, Any]] = []
    own.recorder = SimpleNamespace(record_rollouts=lambda step, columns: recorded.append(columns))
    own.tokenizer.batch_decode = lambda ids, **_: ["text"] * len(ids)
    made = batch()
    made.keys[KEYS.index("b_1_0")] = "b_0_1"  # a second output of the first answer
    own._compute_advantage(made, {})
    assert recorded[0]["prompt"] == ["a", "a", "b", "b"]
    assert recorded[0]["reward/score"] == [1.0, 0.0, 1.0, 0.25]
    with pytest.raises(ValueError, match="2 outputs or more"):
        trainer(["ppl_shaping"], queue(), monkeypatch)._compute_advantage(made, {})


@pytest.mark.parametrize(("temperature", "passes"), [(1.0, 1), (0.7, 2)])
def test_entropy_takes_another_pass_where_the_temperature_is_not_1(
    monkeypatch: pytest.MonkeyPatch, temperature: float, passes: int
) -> None:
    own = trainer(["entropy_advantage"], queue(), monkeypatch)
    own.config.actor_rollout_ref.rollout.temperature = temperature
    temperatures: list[float] = []
    own._whole_group = SimpleNamespace(
        compute_log_prob=lambda batch: temperatures.append(batch.extra_info["temperature"])
    )

    def first(self: Any, batch: Any, metrics: Any) -> Any:
        temperatures.append(temperature)
        return batch

    monkeypatch.setattr(ours.PPOTrainerSync, "_compute_old_log_prob", first)
    monkeypatch.setattr(ours, "response_from_nested", lambda values, mask: values)
    own._compute_old_log_prob(batch(), {})
    assert temperatures == [temperature, 1.0][:passes]


def test_each_prompt_is_sent_with_its_answers_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    own = trainer([{"element_wise_temperature": {"solve_rates": {"a": 1.0, "b": 0.0}}}], queue(), monkeypatch)
    sent: list[Any] = []

    def submit(self: Any, batch: Any) -> int:
        sent.append(batch)
        return len(batch)

    monkeypatch.setattr(ours.PPOTrainerSync, "_submit_batch_to_rollout", submit)
    prompts = [[{"role": "user", "content": "b"}], [{"role": "user", "content": "a"}]]
    own._submitted_prompts, own._rows = [], {}
    own._submit_batch_to_rollout(tu.get_tensordict({"uid": ["b", "a"], "raw_prompt": prompts}))
    assert list(sent[0]["agent_name"]) == ["explorl_single_turn_agent"] * 2
    assert own._rows == {"b": [{"temperature": 1.5}] * 2, "a": [{"temperature": 0.6}] * 2}
    temperatures = own._temperatures(KEYS, lambda row, default: row.get("temperature", default))
    torch.testing.assert_close(temperatures, torch.tensor([1.5, 0.6, 0.6, 1.5, 1.0]))
    counted = {"uid": ["b", "a"], "raw_prompt": prompts, "__rollout_n__": torch.tensor([3, 1])}
    own._submit_batch_to_rollout(tu.get_tensordict(counted))
    assert {uid: len(rows) for uid, rows in own._rows.items()} == {"b": 3, "a": 1}
    with pytest.raises(ValueError, match="agent loop 'mine' does not take sampling parameters"):
        named = tu.get_tensordict({"uid": ["b"], "raw_prompt": prompts[:1], "agent_name": ["mine"]})
        own._submit_batch_to_rollout(named)


def test_passes_take_the_temperature_from_the_rows() -> None:
    calls: list[Any] = []
    group = SimpleNamespace(compute_log_prob=calls.append, world_size=3)
    own = ours._RowTemperature(group)
    rows = batch()
    rows.extra_info["temperature"] = 1.0
    own.compute_log_prob(rows)
    assert "temperature" not in calls[0].extra_info
    assert own.world_size == 3
