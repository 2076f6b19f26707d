# make rehearse  the first recipe, small, on this machine: installs, trains, evaluates      make test      the tests but the slow ones
# make install   .venv with the CPU stack, or the CUDA stack where an NVIDIA GPU is found   make test-all  every test     make lint  ruff
REQUIREMENTS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo requirements.txt || echo requirements-cpu.txt)
NO_DEPS := $(if $(findstring cpu,$(REQUIREMENTS)),--no-deps)# that list is whole, and pip's resolver would refuse it
# Named by content and written last: a changed list, or an installation that was cut short, is installed again.
INSTALLED := .venv/installed-$(shell cat $(REQUIREMENTS) | cksum | cut -d' ' -f1)
PYTHON := .venv/bin/python

export PYTHONPATH := $(CURDIR)
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: rehearse install test test-all lint

rehearse: $(INSTALLED)
	@$(PYTHON) recipes/dapo_glm5p3_lora.py --rehearse $(ARGS)

test: $(INSTALLED)
	@$(PYTHON) -m pytest -q checks -m "not slow" $(ARGS)

test-all: $(INSTALLED)
	@$(PYTHON) -m pytest -q checks $(ARGS)

lint: $(INSTALLED)
	@.venv/bin/ruff check .

install: $(INSTALLED)

$(INSTALLED):
	@rm -f .venv/installed-*
	@if ! $(PYTHON) -c 'import sys, pip; assert sys.version_info[:2] == (3, 12)' 2>/dev/null; then \
	    for python in python3.12 python3 python none; do \
	        $$python -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null && break; \
	    done; \
	    if [ $$python = none ]; then echo "Python 3.12 is needed and none was found: install it so that 'python3.12' runs." >&2; exit 1; fi; \
	    rm -rf .venv && $$python -m venv .venv || exit 1; \
	fi
	@echo "installing $(REQUIREMENTS) into .venv: minutes, once"
	@$(PYTHON) -m pip install -q --disable-pip-version-check $(NO_DEPS) -r $(REQUIREMENTS)
	@touch $@
