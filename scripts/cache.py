"""Write a target's hidden states to disk, every rank a part of them: `draftsmith cache` as a file, for launchers.

python scripts/cache.py --config train.yaml --output_dir states
torchrun --nproc_per_node 8 scripts/cache.py --config train.yaml --output_dir states
"""

import sys

from draftsmith.commands import main


if __name__ == "__main__":
    main(["cache", *sys.argv[1:]])
