"""Other samplers, with the engine's parameters and, except for `generate`, its token statistics.

`generate` is `model.generate`, the reference, with `processors` for what it lacks. The other modules use vLLM:

1. `chain`: the cuts of `explorl.rollout.sampling`, in a form that travels with a request to another process, and log q
   of the sampled tokens.
2. `vllm_processor`: a logits processor that applies the chain inside vLLM; found through the entry point
   ``vllm.logits_processors``.
3. `vllm`: `VllmEngine`, which samples with vLLM in this process or on a server; `vllm_requests` translates requests.
4. `token_stats`: log π, log q, entropy and branching factor of the tokens, from a pass of the training model.

Nothing here imports vLLM before it is used.
"""
