"""Measurements, printed and kept under `benchmarks/` with the machine. Random data. `-h` after a name: its options.

python scripts/benchmark.py loss-memory        peak resident growth of the draft loss over its rows, streamed and dense
python scripts/benchmark.py loss               streaming losses against bare products, torch, Liger and CCE (GPU)
python scripts/benchmark.py lm                 full fine-tuning with whole and with streamed logits (GPU)
python scripts/benchmark.py loss-figures       figures and Markdown tables from the results of the two
python scripts/benchmark.py attention          every attention engine against FlexAttention and dense (GPU)
python scripts/benchmark.py attention-memory   time and memory over the length, ours, FlexAttention, dense (GPU)
python scripts/benchmark.py attention-figures  figures and Markdown tables from the results of the two
python scripts/benchmark.py targets            forward of whole targets under our attention and transformers' (GPU)
python scripts/benchmark.py train              draft steps and whole training steps, ours and SpecForge's (GPU)
python scripts/benchmark.py train-figures      figure and Markdown tables from its results
python scripts/benchmark.py prepare            preparation of data against plain tokenizer calls, its memory, packing
python scripts/benchmark.py scaling            the trainer under DeepSpeed on one GPU and on several (GPUs)
python scripts/benchmark.py scaling-model      more GPUs predicted from one, and held against what is measured
python scripts/benchmark.py adaptation         a head moved to a new domain, full fine-tuning against LoRA, decoded
python scripts/benchmark.py heads              trained heads, one choice changed at a time, decoded (GPU)
python scripts/benchmark.py heads-figures      figures and Markdown tables from its results
python scripts/benchmark.py heads-peer         a head trained by SpecForge's classes and recipe on our documents (GPU)
python scripts/benchmark.py cache              size of cached hidden states, and how fast they are coded
"""

import argparse
import importlib
import sys


BENCHMARKS = {
    "loss-memory": "loss_memory",
    "loss": "loss",
    "lm": "lm",
    "loss-figures": "loss_figures",
    "attention": "attention",
    "attention-memory": "attention_memory",
    "attention-figures": "attention_figures",
    "targets": "targets",
    "train": "train",
    "train-figures": "train_figures",
    "prepare": "prepare",
    "scaling": "scaling",
    "scaling-model": "scaling_model",
    "adaptation": "adaptation",
    "heads": "heads",
    "heads-figures": "heads_figures",
    "heads-peer": "heads_peer",
    "cache": "cache",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    name = parser.parse_args(arguments[:1]).benchmark
    importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
