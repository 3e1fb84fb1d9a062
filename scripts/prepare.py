"""Turn chat data into token ids, supervision masks and packed rows: `draftsmith prepare` as a file, for launchers.

python scripts/prepare.py --config configs/demo.yaml
python scripts/prepare.py --help
"""

import sys

from draftsmith.commands import main


if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
