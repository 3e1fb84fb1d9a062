"""Write answers with the target: `draftsmith generate` as a file.

python scripts/generate.py --config generate.yaml
"""

import sys

from draftsmith.commands import main


if __name__ == "__main__":
    main(["generate", *sys.argv[1:]])
