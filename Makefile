# Every target installs what it needs into .venv first; when nothing has changed since, that takes no time.
#   make demo [TARGET=<Hub id or directory>]   train and try a draft head for a small real target
#   make test                                  ruff, mypy and the tests that need neither a GPU nor long
#   make test-slow                             the end-to-end tests
#
# pip's default torch for Linux brings CUDA, several GB. Without a GPU, take the CPU build: PyTorch's installation page
# names its package index, to be passed as make TORCH_OPTIONS="--index-url <that index>".

PYTHON ?= python3
TARGET ?=
TORCH_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
unexport TRITON_INTERPRET

.PHONY: demo test test-slow lint clean

demo: $(DEMO)
	$(BIN)/python scripts/demo.py $(if $(TARGET),--target "$(TARGET)")

test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu and not slow"

test-slow: $(DEV)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch goes first and alone, so that TORCH_OPTIONS chooses the build of torch and nothing else.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH_OPTIONS) torch
	touch $@

$(DEMO): $(VENV)/.torch setup.cfg
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(DEV): $(VENV)/.torch setup.cfg
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
