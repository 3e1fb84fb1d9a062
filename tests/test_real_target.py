"""With the real SmolLM2-135M-Instruct: the training state equals serial drafting, decoding equals the target's own."""

import sys
from pathlib import Path

import pytest
import torch

from draftsmith import Eagle3DraftModel
from draftsmith.alignment import row_sets
from draftsmith.speculative import speculative_generate
from draftsmith.target import FrozenTarget, load_target
from tests.models.test_unroll import drafts_serially, trained_logits


pytestmark = pytest.mark.slow
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))


@pytest.fixture(scope="module")
def target():
    from demo import GGUF, fetch_default_target

    return load_target(fetch_default_target()[1], gguf_file=GGUF, dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"init_from_layer": -1, "norm_output": True, "fc_norm": True}], ids=str)
def test_training_state_equals_serial_drafting(target, options):
    """In fp64: in fp32 some random heads carry rounding from step to step until it is 1e-3 of the logits."""
    model = Eagle3DraftModel.from_target(target, **options).double()
    model.set_input_embeddings(target.get_input_embeddings().weight.double())
    ids = torch.randint(target.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    states = FrozenTarget(target, model.config.eagle_aux_hidden_state_layer_ids)(ids)
    batch = {
        "input_ids": ids,
        "aux_hidden_states": states.aux_hidden_states.double(),
        "teacher_hidden_states": states.last_hidden_state.double(),
        "teacher_head": target.lm_head.weight.double(),
        "loss_mask": torch.ones_like(ids),
    }
    with torch.no_grad():
        ours = trained_logits(model, batch, ttt_steps=5, row_sets=row_sets(batch["loss_mask"], ttt_steps=5))
        truth = drafts_serially(model, batch, 24, 5)
    assert len(ours) == 22 + 21 + 20 + 19 + 18
    for pair, logits in ours.items():
        torch.testing.assert_close(logits, truth[pair], rtol=1e-9, atol=1e-9)


def test_decoding_equals_the_targets_own(target):
    draft = Eagle3DraftModel.from_target(target, init_from_layer=-1)
    prompt = torch.randint(target.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    sequences, drafted, _ = speculative_generate(
        target, draft, prompt, num_draft_tokens=4, max_new_tokens=24, eos_token_id=[]
    )
    plain = target.generate(prompt, do_sample=False, max_new_tokens=24, eos_token_id=None)
    assert torch.equal(sequences, plain) and (drafted > 0).all()
