"""Blocks of packed rows through the kernels of the training pass, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from explorl.modeling.packed import packed_rows
from explorl.training.sft import packed_rows as sft_rows
from explorl.training.sft.packed_rows import TokenRows

language = pytest.importorskip("triton.language")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and type(language.sum).__name__ != "InterpretedFunction":
    pytest.skip("no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU", allow_module_level=True)


@pytest.mark.slow
def test_a_pass_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients of rows of very different lengths, with kernels and without, are those of each row alone."""
    from tests.rollout.models import build

    monkeypatch.setitem(sft_rows.MIN_SAVING, DEVICE.type, 1)
    model = build("llama").to(DEVICE)
    lengths = np.array([2, 3, 3, 7, 8, 15])
    ids = np.random.default_rng(0).integers(3, 90, lengths.sum())
    rows = TokenRows(ids, ids, lengths)
    some = rows.packed(np.arange(len(lengths)), DEVICE)
    assert len(some["rows"].blocks) == 3
    slopes = torch.randn(len(ids), model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def result(states: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (states * slopes).sum().backward()
        return [states.detach(), *(p.grad.clone() for p in model.model.parameters() if p.grad is not None)]

    alone = [
        model.model(torch.tensor(row[None], device=DEVICE)).last_hidden_state[0]
        for row in np.split(ids, np.cumsum(lengths)[:-1])
    ]
    expected = result(torch.cat(alone))
    for use_kernels in (False, True):
        with packed_rows(model, some["rows"], True, use_kernels):
            states = model.model(input_ids=some["input_ids"], position_ids=some["position_ids"]).last_hidden_state[0]
        for got, wanted in zip(result(states), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
