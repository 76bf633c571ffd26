# DeepSpeed on CPUs, in its own environment: DS_ACCELERATOR=cpu builds none of its CUDA kernels.
# SHARDED=FOLDER uses another environment.
SHARDED ?= .venv-sharded

.PHONY: scale-sharded
scale-sharded: $(SHARDED)/.installed
	$(SHARDED)/bin/python -m pytest -m scale tests/scale/sharded

# DeepSpeed is built from source; its build needs torch and setuptools.
$(SHARDED)/.installed: $(SCALE_COMMON)/.installed pyproject.toml scale/sharded.mk scale/sharded-requirements.txt
	$(call scale-environment,$(SHARDED),scale/sharded-requirements.txt)
	DS_ACCELERATOR=cpu $(SHARDED)/bin/python $(SCALE_PIP) --no-build-isolation deepspeed==0.19.8
	touch $@
