# The virtual environments of make scale: one holds the common packages; the others refer to it. Their lists name every
# package, so pip resolves nothing, and packages that are never imported are not compiled.
SCALE_COMMON ?= .venv-scale
SCALE_PIP = -m pip --disable-pip-version-check install --quiet --no-deps --no-compile

# They are compiled on first import, even if the shell disables writing bytecode.
scale-vllm scale-sharded scale-verl: export PYTHONDONTWRITEBYTECODE =

.PHONY: scale-installed
scale-installed:
	$(MAKE) --jobs 2 $(VLLM_VENV)/.installed $(SHARDED)/.installed $(VERL)/.installed

$(SCALE_COMMON)/.installed: scale/common-requirements.txt scale/common.mk
	$(PYTHON) -m venv $(SCALE_COMMON)
	$(SCALE_COMMON)/bin/python $(SCALE_PIP) --requirement scale/common-requirements.txt
	touch $@

# Create the environment $(1) with the packages of $(2) in addition to the common ones, and Explorl.
define scale-environment
	$(PYTHON) -m venv $(1)
	$(SCALE_COMMON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(1)/common.pth
	mv $(1)/common.pth $(1)/lib/python3.*/site-packages
	$(1)/bin/python $(SCALE_PIP) --requirement $(2)
	$(1)/bin/python $(SCALE_PIP) --no-build-isolation --editable .
endef
