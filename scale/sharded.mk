# DeepSpeed on CPUs, in an environment of its own: DS_ACCELERATOR=cpu builds none of its CUDA kernels.
# SHARDED=FOLDER takes another environment.
SHARDED ?= .venv-sharded
SHARDED_PIP := $(SHARDED)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: scale-sharded
scale-sharded: $(SHARDED)/.installed
	$(SHARDED)/bin/python -m pytest -m scale tests/scale/sharded

# torch and setuptools first: DeepSpeed is built from source, and looks at them while it is.
$(SHARDED)/.installed: pyproject.toml constraints.txt scale/sharded.mk scale/sharded-constraints.txt
	$(PYTHON) -m venv $(SHARDED)
	$(SHARDED_PIP) --constraint scale/sharded-constraints.txt torch setuptools wheel ninja
	DS_ACCELERATOR=cpu $(SHARDED_PIP) --constraint scale/sharded-constraints.txt --no-build-isolation deepspeed
	$(SHARDED_PIP) --editable '.[test]'
	touch $@
