"""One module per benchmark, each with `main(arguments)`; `scripts/benchmark.py` picks by name."""
