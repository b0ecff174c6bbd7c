# `make` or `make help` lists the targets. All of them work in .venv, made on first use; to use
# another environment instead, name its interpreter: `make test PY=python3`.

VENV := .venv
STAMP := $(VENV)/.installed

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
ENVIRONMENT := $(STAMP)
endif

# The pin lives in constraints.txt, once.
TORCH := $(shell grep '^torch==' constraints.txt)
# Set TORCH_INDEX_URL to choose a build of torch, for example the CPU one.
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full test-deepspeed test-zoo lint clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## make .venv with all that tests and lint need

# The stamp is written last and removed first: without it the environment may be half made, and is
# made anew. With it, a change of setup.py or constraints.txt only updates what is there.
# torch comes first and alone, so that nothing else chooses another build of it.
$(STAMP): setup.py constraints.txt
	@if [ -e $(STAMP) ]; then rm $(STAMP); else python3 -m venv --clear $(VENV); fi
	@if [ -z '$(TORCH_INDEX_URL)' ] && ! nvidia-smi >/dev/null 2>&1; then \
		echo 'No NVIDIA GPU found. If pip fetches a CUDA build of torch, which is large, stop and'; \
		echo 'set TORCH_INDEX_URL to the package index of the CPU builds.'; \
	fi
	$(VENV)/bin/python -m pip install $(TORCH_INDEX) '$(TORCH)'
	$(VENV)/bin/python -m pip install -c constraints.txt -e '.[det,dev]'
	@touch $(STAMP)

demo: $(ENVIRONMENT) ## run tools/demo.py
	$(PY) tools/demo.py

# One thread per process: distributed tests start several ranks on the same cores.
test test-full test-deepspeed test-zoo: export OMP_NUM_THREADS := 1

test: $(ENVIRONMENT) ## the tests that run anywhere in a few minutes
	$(PY) -m pytest tests -m 'not slow and not gpu and not deepspeed'

test-full: $(ENVIRONMENT) ## the slow tests too
	$(PY) -m pytest tests -m 'not gpu and not deepspeed'

# Only here is DeepSpeed installed; pip does nothing where it is there already.
test-deepspeed: $(ENVIRONMENT) ## the tests on DeepSpeed, which it installs
	$(PY) -m pip install -c constraints.txt -e '.[deepspeed]'
	$(PY) -m pytest tests -m deepspeed

# Without what they need besides: their models import without it, and torchvision would choose a torch.
ZOO := mmsegmentation mmpretrain timm einops ftfy importlib-metadata mat4py markdown model-index ordered-set wcwidth zipp
# Adapters.
ZOO += peft accelerate psutil
# Optimizers.
ZOO += bitsandbytes lion-pytorch prodigyopt schedulefree torchao

# Only here are these installed; `make test-full` runs the same tests where they are, and skips them elsewhere.
test-zoo: $(ENVIRONMENT) ## the tests on models and optimizers of other packages, which it installs
	$(PY) -m pip install -c constraints.txt --no-deps $(ZOO)
	$(PY) -m pytest tests -m zoo

lint: $(ENVIRONMENT) ## ruff (lint and format), mypy, codespell
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib

clean: ## remove caches and build products; keeps .venv, data and work_dirs
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find mmzero tests tools configs projects -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
