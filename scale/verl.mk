# verl's own driver on Ray, with Explorl's plug-in: the trainer end to end on a CPU. VERL=FOLDER is another environment.
VERL ?= .venv-verl
VERL_PIP = $(VERL)/bin/python -m pip --disable-pip-version-check install --quiet

.PHONY: scale-verl
scale-verl: $(VERL)/.installed
	PYTHONPATH="$(CURDIR)/src" $(VERL)/bin/python -m pytest -m scale -p no:cacheprovider --timeout=900 tests/scale/verl

$(VERL)/.installed: scale/verl.mk scale/verl-requirements.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL_PIP) --constraint constraints.txt torch
	$(VERL_PIP) --no-deps --requirement scale/verl-requirements.txt
	$(VERL_PIP) --no-deps --editable .
	$(VERL_PIP) --no-deps --upgrade --target $(VERL)/trl --constraint constraints.txt trl
	touch $@
