"""Samplers that are not ours, with the parameters and the records of `explorl.rollout.Engine`.

1. `chain`: what FORMULAS.md §1 says of a row of logits, in a form that travels with a request to another process, and
   log q of the tokens that came back.
2. `vllm_processor`: vLLM's logits processor, which applies the chain there; found through the entry point
   ``vllm.logits_processors``.
3. `vllm`: `VllmEngine`, which samples with vLLM in this process or on a server, and `vllm_requests`, a request in
   vLLM's words.
4. `recorded`: log π, log q, entropy and branching factor of the tokens, by a pass of the training model.

Nothing here imports vLLM before it is used.
"""
