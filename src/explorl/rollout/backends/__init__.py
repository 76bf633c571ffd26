"""Samplers that are not ours, with the parameters and, but for `generate`, the records of `explorl.rollout.Engine`.

`generate` is `model.generate`, the reference, with `processors` for what it lacks. The others are the way of vLLM:

1. `chain`: the cuts of `explorl.rollout.sampling`, in a form that travels with a request to another process, and log q
   of the tokens that came back.
2. `vllm_processor`: vLLM's logits processor, which applies the chain there; found through the entry point
   ``vllm.logits_processors``.
3. `vllm`: `VllmEngine`, which samples with vLLM in this process or on a server, and `vllm_requests`, a request in
   vLLM's words.
4. `recorded`: log π, log q, entropy and branching factor of the tokens, by a pass of the training model.

Nothing here imports vLLM before it is used.
"""
