"""The Python of the README runs as it stands, in one go, on a tiny target in place of the one that it names."""

import re
from pathlib import Path

from tests.data.common import CHATML, build_tokenizer

from .tiny_models import tiny_model


README = Path(__file__).parents[1] / "README.md"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_python_runs(tmp_path, monkeypatch, capsys):
    tokenizer = build_tokenizer(CHATML)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=8, **ids).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))
    assert code.count(NAME) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_CACHE_HOME", str(tmp_path / "cache"))  # where prepared data is kept
    exec(code.replace(NAME, str(tmp_path / "target")), {})
    assert "What is a draft head?" in capsys.readouterr().out
    assert (tmp_path / "head" / "model.safetensors").exists()
