"""Run by launchers in tests: `scripts/train.py` as it is, where DeepSpeed compiles nothing first."""

import runpy

from .ranks import ROOT, compile_nothing


if __name__ == "__main__":
    compile_nothing()
    runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")
