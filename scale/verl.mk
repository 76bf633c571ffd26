# verl's own driver on Ray, with Explorl's plug-in: the trainer end to end on a CPU. VERL=FOLDER uses another environment.
VERL ?= .venv-verl

.PHONY: scale-verl
scale-verl: $(VERL)/.installed
	PYTHONPATH="$(CURDIR)/src" $(VERL)/bin/python -m pytest -m scale -p no:cacheprovider --timeout=900 tests/scale/verl

$(VERL)/.installed: $(SCALE_COMMON)/.installed pyproject.toml scale/verl.mk scale/verl-requirements.txt
	$(call scale-environment,$(VERL),scale/verl-requirements.txt)
	$(VERL)/bin/python $(SCALE_PIP) --upgrade --target $(VERL)/trl --constraint constraints.txt trl
	touch $@
