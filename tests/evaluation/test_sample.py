"""The one path that samples and verifies: what its callers draw, what fails, and the table on disk."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from explorl.analysis.checkpoint_samples import checkpoint_table
from explorl.analysis.impact_sampling import ContinuationLimits, TokenProbe, sample_impacts
from explorl.core.config import load_config
from explorl.core.store import RunStore, StoreError
from explorl.evaluation import evaluate, protocol
from explorl.evaluation.completions import COLUMNS
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.results_folder import EvaluationFolder, load_evaluation
from explorl.evaluation.sample import open_engine, prompted_problems, sample_and_verify
from explorl.models import Policy, load_policy
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.requests import eos_token_ids, prompt_token_ids
from explorl.tasks import get_task
from explorl.training.rft.fitting import derived_seed
from explorl.training.rft.folder import IterationFolder
from explorl.training.rft.samples import from_columns
from explorl.training.rft.sampling import PoolSampler

TASK = get_task("countdown-mini")
PROBLEMS = TASK.problems("holdout", limit=7)
HOW = protocol("plain", samples=5, max_tokens=48)


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy("tiny", device="cpu")


def digest(*columns: Any) -> str:
    return hashlib.blake2b(json.dumps(columns, ensure_ascii=False).encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------- what a seed draws, from version to version
def test_an_evaluation_draws_what_it_always_drew(tiny: Policy) -> None:
    rows = evaluate(tiny, TASK, PROBLEMS, HOW, seed=3, batch_size=7).rows
    assert digest(rows["completion"], rows["correct"]) == "279a8052864563a6"


def test_generate_draws_what_it_always_drew(tiny: Policy) -> None:
    torch.manual_seed(0)
    rows = evaluate(tiny, TASK, PROBLEMS, HOW, engine="generate", batch_size=6).rows
    assert digest(rows["completion"], rows["correct"]) == "5d9d677eaa86db6a"


def test_an_evaluation_in_a_folder_draws_what_it_always_drew(tiny: Policy, tmp_path: Path) -> None:
    for samples, limit in ((3, 5), (18, 7)):
        how = replace(HOW, samples=samples)
        (found,) = run_evaluation([tiny], ["countdown-mini"], how, tmp_path, limit=limit, chunk=3, seed=1)
    rows = load_evaluation(found.folder, ("completion",)).rows
    assert digest(rows["completion"], rows["correct"]) == "056cd0b0273784d5"


def test_a_pool_of_rft_draws_what_it_always_drew(tiny: Policy) -> None:
    values = {"model": {"name": "tiny"}, "rollout": {"max_tokens": 40}, "rft": {"samples": 4}}
    config = load_config(preset="tiny-rft", values=values)
    problems = TASK.problems("train", limit=4)
    prompts = [TASK.prompt(problem, config.task.template) for problem in problems]
    sampler = PoolSampler(config, tiny, TASK, "<answer>")
    pool = from_columns(sampler.sample(problems, prompts, derived_seed(config.seed, 1, "sample", 0)))
    texts, verdicts = [sample.text for sample in pool], [sample.correct for sample in pool]
    assert digest(texts, verdicts, [sample.cut and sample.cut.text for sample in pool]) == "82bade47ca134124"


def test_an_analysis_of_a_checkpoint_draws_what_it_always_drew(tiny: Policy) -> None:
    table = checkpoint_table(tiny, TASK, HOW, limit=6, seed=4)
    assert digest([int(token) for token in table.tokens["token_ids"]]) == "9d1e8723d55279b9"


def test_continuations_are_what_they_always_were(tiny: Policy) -> None:
    engine, stop_ids = Engine(tiny.model, tiny.tokenizer), tuple(eos_token_ids(tiny.model, tiny.tokenizer))
    rollouts = engine.generate([TASK.prompt(problem) for problem in PROBLEMS], 1, replace(HOW.sampling, seed=5))
    probes = [
        TokenProbe(
            prompt_token_ids(tiny.tokenizer, TASK.prompt(problem)), rollout.token_ids,
            min(3 * index, len(rollout) - 1), 5 + index, problem,
        )
        for index, (problem, rollout) in enumerate(zip(PROBLEMS, rollouts, strict=True))
    ]  # fmt: skip
    probes.append(replace(probes[0], other_id=stop_ids[0], position=2))
    found = sample_impacts(
        engine, TASK, probes, samples=4, limits=ContinuationLimits(40, 256, stop_ids), temperature=1.0, seed=9
    )
    texts = [
        [[each.text, each.correct, each.finish] for each in side.continuations]
        for token in found.tokens
        for side in (token.sampled, token.other)
    ]
    assert digest(texts) == "82c85097e8fa7b1f"


# ---------------------------------------------------------------- the function itself
def test_unwanted_completions_keep_the_numbering(tiny: Policy) -> None:
    asked = prompted_problems(tiny.tokenizer, PROBLEMS, [TASK.prompt(problem) for problem in PROBLEMS])
    engine, params = open_engine(tiny), SamplingParams(max_tokens=24, seed=2)
    whole = sample_and_verify(engine, TASK, asked, 3, params)
    wanted, counts = np.zeros((len(PROBLEMS), 3), dtype=bool), []
    wanted[2, 1] = wanted[5, 0] = True
    some = sample_and_verify(engine, TASK, asked, 3, params, wanted=wanted, on_finish=counts.append)
    assert sum(counts) == 2
    assert [(each.problem_index, each.sample) for each in some] == [(2, 1), (5, 0)]
    assert [each.completion.text for each in some] == [whole[7].completion.text, whole[15].completion.text]
    assert [each.verdict for each in some] == [whole[7].verdict, whole[15].verdict]


def test_failed_completions_raise_unless_they_are_kept(tiny: Policy) -> None:
    broken = load_policy("tiny", device="cpu")
    with torch.no_grad():
        broken.model.get_input_embeddings().weight.fill_(float("nan"))
    engine = Engine(broken.model, broken.tokenizer)
    asked = prompted_problems(tiny.tokenizer, PROBLEMS[:1], [TASK.prompt(PROBLEMS[0])])
    params = SamplingParams(max_tokens=4, seed=2)
    with pytest.raises(RuntimeError, match="finite"):
        sample_and_verify(engine, TASK, asked, 2, params)
    failed = sample_and_verify(engine, TASK, asked, 2, params, keep_failed=True)
    assert [each.completion.finish_reason for each in failed] == ["error"] * 2
    assert not any(each.verdict.correct for each in failed)


# ---------------------------------------------------------------- the table on disk
def test_all_files_of_completions_have_the_same_columns(tiny: Policy, tmp_path: Path) -> None:
    how = protocol("plain", samples=2, max_tokens=8)
    evaluate(tiny, TASK, PROBLEMS[:2], how).save(tmp_path, "step")
    (found,) = run_evaluation([tiny], ["countdown-mini"], how, tmp_path, limit=2, token_records=False)
    iteration = IterationFolder(RunStore(tmp_path / "run"), 1)
    sampler = PoolSampler(load_config(preset="tiny-rft"), tiny, TASK, "<answer>")
    prompts = [TASK.prompt(problem) for problem in PROBLEMS[:2]]
    iteration.write_part(0, sampler.sample(PROBLEMS[:2], prompts, 0), 1.0)
    iteration.join_parts(1)
    (part,) = EvaluationFolder(found.folder).parts()
    step, folder, pool = (pq.read_schema(path) for path in (tmp_path / "step.parquet", part, iteration.pool_path))
    assert step.names == list(COLUMNS)
    assert folder.equals(step)
    assert pool.names[: len(COLUMNS)] == list(COLUMNS)
    assert all(pool.field(name).type == step.field(name).type for name in COLUMNS)


def test_a_pool_of_an_earlier_format_is_refused(tmp_path: Path) -> None:
    iteration = IterationFolder(RunStore(tmp_path), 1)
    iteration.folder.mkdir(parents=True)
    old = {"problem": ["p"], "sample": [0], "text": ["1+1"], "correct": [True], "finished": [True]}
    pq.write_table(pa.table(old), iteration.pool_path)
    with pytest.raises(StoreError) as refusal:
        iteration.pool()
    assert str(iteration.pool_path) in str(refusal.value)
    assert f"remove {iteration.folder} to sample" in str(refusal.value)
