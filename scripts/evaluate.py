"""Measure the acceptance length on held-out prompts: `draftsmith evaluate` as a file, for launchers.

python scripts/evaluate.py --config configs/demo.yaml
torchrun --nproc_per_node 8 scripts/evaluate.py --config configs/demo.yaml
"""

import sys

from draftsmith.commands import main


if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
