"""Train a draft head on a frozen target: `draftsmith train` as a file, for launchers.

python scripts/train.py --config configs/demo.yaml
torchrun --nproc_per_node 8 scripts/train.py --config configs/demo.yaml
deepspeed --num_gpus 8 scripts/train.py --config configs/demo.yaml --deepspeed configs/deepspeed/zero2.json
accelerate launch --config_file configs/accelerate/zero2.yaml scripts/train.py --config configs/demo.yaml
"""

import sys

from draftsmith.commands import main


if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
