import json
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from draftsmith import Eagle3DraftConfig
from draftsmith.commands import main
from draftsmith.commands import profile as command
from draftsmith.commands.heap import attempt, mark, marked, record
from draftsmith.commands.profile import CONTENDERS, ProfileArguments, make_step, profile_contender
from draftsmith.models.eagle3 import unroll_eagle3


CONFIG = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
CPU = torch.device("cpu")
FORWARD = ["fuse", "step 0", "step 1", "step 2", "loss"]
PHASES = [*FORWARD, *(f"backward of {phase}" for phase in reversed(FORWARD))]
SIZES = {"row_length": 192, "ttt_steps": 3, "draft_vocab_size": 1024, "dtype": "float32"}


@pytest.fixture
def target(tmp_path):
    LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def flags(target_dir, chart, **fields):
    given = {"target": target_dir, "output": str(chart), **SIZES, **fields}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def step_of(device=CPU, config=CONFIG, **fields):
    args = ProfileArguments(**{**SIZES, **fields})
    config = Eagle3DraftConfig.from_target(LlamaConfig(**config), draft_vocab_size=args.draft_vocab_size)
    return make_step(config, args, device)


def gradient_bytes(step):
    return sum(parameter.nbytes for parameter in step.draft.parameters() if parameter.requires_grad)


def test_the_chart_its_figures_and_a_table_are_written(target, tmp_path, capsys):
    output = tmp_path / "figures" / "heap.png"
    report = command.main(flags(target, output))
    assert output.read_bytes().startswith(b"\x89PNG")
    assert json.loads(output.with_suffix(".json").read_text()) == report
    assert sorted(path.name for path in output.parent.iterdir()) == ["heap.json", "heap.png"]
    assert report["shapes"]["draft_vocab_size"] == 1024 and report["setup"]["target"] == target
    assert report["rows"] == [190, 189, 188]
    assert list(report["contenders"]) == ["ours", "dense logits", "dense attention"]
    for contender in report["contenders"].values():
        assert list(contender["phases"]) == PHASES
        assert contender["peak"] == contender["phases"][contender["peak_phase"]]
        assert contender["failure"] is None
    text = capsys.readouterr().out
    assert "backward of step 2" in text and "dense attention" in text and "peak, MiB" in text


def test_ours_needs_less_where_it_should():
    step = step_of()
    with marked(step.draft, 3):
        heaps = {name: profile_contender(step, contender) for name, contender in CONTENDERS.items()}
    ours, logits, attention = (heap.peaks for heap in heaps.values())
    assert ours["loss"] < 0.5 * logits["loss"]
    assert ours["backward of step 2"] < 0.3 * attention["backward of step 2"]
    # What a contender does not change stays as it is.
    assert [logits[phase] for phase in PHASES[:4]] == [ours[phase] for phase in PHASES[:4]]
    extra = attention["loss"] - ours["loss"]
    assert extra >= 4 * (4 * 190 * 192 + 4 * 189 * (192 + 189) + 4 * 188 * (192 + 2 * 188))  # the probabilities


@pytest.mark.parametrize("fields", [{}, {"gradient_checkpointing": True}, {"supervised": 0.25}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_only_gradients_are_left_and_phases_are_in_order(contender, fields):
    step = step_of(**fields)
    with marked(step.draft, 3) as phases:
        heap = profile_contender(step, CONTENDERS[contender])
    assert list(heap.phases) == phases == PHASES
    assert heap.end == gradient_bytes(step)
    levels = list(heap.phases.values())
    assert levels[0][0] == 0
    assert [before[-1] for before in levels[:-1]] == [after[0] for after in levels[1:]]


def test_recomputing_keeps_less_of_the_unroll():
    peaks = []
    for recompute in (False, True):
        step = step_of(gradient_checkpointing=recompute)
        with marked(step.draft, 3):
            peaks.append(profile_contender(step, CONTENDERS["ours"]).phases["backward of loss"][0])
    assert peaks[1] < 0.7 * peaks[0]


def test_recomputing_by_rows_passes_the_same_phases(monkeypatch):
    monkeypatch.setattr(unroll_eagle3, "RECOMPUTED_ROWS", 50)
    step = step_of(gradient_checkpointing=True)
    with marked(step.draft, 3) as phases:
        assert list(profile_contender(step, CONTENDERS["ours"]).phases) == phases


@pytest.mark.parametrize("supervised", [1.0, 0.3])
def test_contenders_compute_the_same_step(supervised):
    step, results = step_of(supervised=supervised), []
    for contender in CONTENDERS.values():
        with contender(step.draft):
            loss = step.run()
        results.append((loss, {name: value.grad for name, value in step.draft.named_parameters()}))
        step.draft.zero_grad(set_to_none=True)
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, results[0][1][name], rtol=1e-3, atol=1e-5)


def test_every_allocation_and_release_is_recorded():
    def step():
        torch.ones(99)  # before the first mark
        mark("one")
        kept = torch.ones(1000)
        both = torch.cat([kept, kept])
        del kept
        mark("two")
        mark("three")
        del both

    heap = record(step, CPU)
    assert heap.phases == {"one": [0, 4000, 12000, 8000], "two": [8000], "three": [8000, 0]}
    assert heap.peaks == {"one": 12000, "two": 8000, "three": 8000} and heap.end == 0


class LiveStorages(TorchDispatchMode):
    """The most bytes that results of operators hold at a time; what lives inside one is not seen."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, weakref.WeakSet()

    def release(self, size):
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if torch.is_tensor(leaf) else None
            if storage is not None and storage._cdata not in given and storage not in self.seen:
                self.seen.add(storage)
                weakref.finalize(storage, self.release, storage.nbytes())
                self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        return result


@pytest.mark.parametrize("contender", CONTENDERS)
def test_peaks_agree_with_those_of_live_tensors(contender):
    step = step_of()
    with marked(step.draft, 3):
        heap = profile_contender(step, CONTENDERS[contender])
    with CONTENDERS[contender](step.draft), LiveStorages() as tensors:
        step.run()
    assert max(heap.peaks.values()) == pytest.approx(tensors.peak, rel=1e-3)


def test_an_unrestrained_allocation_is_a_failure_where_it_happens():
    def step():
        mark("one")
        kept = torch.ones(1000)
        mark("two")
        kept = kept.clone()
        return kept, torch.empty(2**50)

    heap = record(step, CPU)
    assert heap.phases == {"one": [0, 4000], "two": [4000, 8000]}  # what the error released is left out
    assert "can't allocate memory" in heap.failure


def test_other_errors_are_errors():
    def step():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        attempt(step)


def test_a_contender_without_room_is_reported(target, tmp_path, monkeypatch, capsys):
    attention = "draftsmith.models.eagle3.layers_eagle3.eager_attention_forward"

    def no_room(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total of 8 GiB.")

    monkeypatch.setattr(attention, no_room)
    report = command.main(flags(target, tmp_path / "heap.png"))
    failed = report["contenders"]["dense attention"]
    assert failed["failure"] == "CUDA out of memory. Tried to allocate 8.00 GiB" and failed["failed_in"] == "step 0"
    assert list(failed["phases"]) == ["fuse", "step 0"]
    assert report["contenders"]["ours"]["failure"] is None
    assert (tmp_path / "heap.png").exists()
    text = capsys.readouterr().out
    assert "dense attention ran out of memory: CUDA out of memory. Tried to allocate 8.00 GiB" in text
    assert "failed" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"supervised": 0}, "`supervised` is 0"),
        ({"supervised": 0.001}, "`supervised` is 0.001, which leaves a `row_length` of 192 no row"),
        ({"row_length": 0}, "`row_length` is 0"),
        ({"ttt_steps": 0}, "`ttt_steps` is 0"),
        ({"output": "heap.svg"}, "`output` is heap.svg"),
        ({"dtype": "int8"}, "dtype"),
        ({"draft": "somewhere"}, "`draft` asks for weights"),
        ({"init_from_layer": -1}, "`init_from_layer` asks for weights"),
        ({"draft_vocab_size": 4096}, "`draft_vocab_size` is 4096"),
        ({"target": "./nowhere"}, "`target`: ./nowhere does not exist"),
        ({"output": "/proc/heap.png"}, "`output`: /proc/heap.png cannot be written"),
        ({"output": "/dev/null/heap.png"}, "`output`: the directory of /dev/null/heap.png cannot be made"),
        ({"draft_hidden_size": 0}, "`draft_hidden_size` is 0"),
        ({"draft_hidden_size": -4}, "`draft_hidden_size` is -4"),
        ({"draft_hidden_size": 20}, "`draft_hidden_size` is 20: pass a multiple of 8"),
        ({"draft_intermediate_size": 0}, "`draft_intermediate_size` is 0"),
    ],
)
def test_wrong_arguments_name_the_remedy(target, tmp_path, fields, message, capsys, monkeypatch):
    if not {"supervised", "row_length"} & fields.keys():
        monkeypatch.setattr(command, "make_step", None)
    with pytest.raises(SystemExit):
        main(["profile", *flags(target, tmp_path / "heap.png", **fields)])
    assert message in capsys.readouterr().err


def test_rows_that_a_machine_without_gpu_cannot_hold_are_refused(target, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    with pytest.raises(SystemExit):
        main(["profile", *flags(target, tmp_path / "heap.png", row_length=8192)])
    assert "`row_length` is 8192" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_run(target, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["profile", *flags(target, tmp_path / "heap.png")])
    assert "pip install draftsmith[plot]" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("contender", CONTENDERS)
def test_on_a_gpu_the_heap_is_the_caching_allocators(contender):
    wide = {**CONFIG, "hidden_size": 512, "num_attention_heads": 4, "intermediate_size": 1024}
    device = torch.device("cuda")
    step = step_of(device, wide, row_length=1024, dtype="bfloat16")
    with marked(step.draft, 3) as phases, CONTENDERS[contender](step.draft):
        step.run()
        step.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        heap = record(step.run, device)
    assert list(heap.phases) == phases
    assert max(heap.peaks.values()) == torch.cuda.max_memory_allocated() - before
    assert heap.end == torch.cuda.memory_allocated() - before >= gradient_bytes(step)
