"""Tests with the real vLLM on a CPU, in an environment of its own: `make test-serving`."""

import os

import pytest


# Read when vLLM is imported or starts an engine. One thread and no binding: the machine may be shared.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its proposals can be seen
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="package", autouse=True)
def vllm_environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        patch.delenv("TRITON_INTERPRET", raising=False)  # set for our kernels' tests; not how vLLM is served
        pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")
        yield


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """Not here: vLLM's buffers are its own affair."""
