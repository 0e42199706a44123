"""The architectures that the field serves: capture, parity, two training steps and generation on a tiny model of each.

Every shipped recipe for such a target is trained here, with the recipe's own method on a model of its architecture.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from field_targets import FIELD, OTHERS, field_target
from tiny import VOCAB, tiny_kept_ids, tiny_rows

from draftsmith.data.generate import Sampling, generate
from draftsmith.data.target import ResolvedTarget, TargetConfig, load_model, resolve_target
from draftsmith.hidden_states.parity import check_parity
from draftsmith.hidden_states.stream import HiddenStatesConfig, open_stream
from draftsmith.hidden_states.transformers_source import TransformersSource
from draftsmith.models.checkpoint import load_head, save_head
from draftsmith.models.head import load_method
from draftsmith.models.target import FrozenTarget
from draftsmith.recipes.schema import load_recipe
from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import fit

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Settings that are of the real target's size.
_OF_A_SIZE = ("aux_layers", "draft_vocab_size", "mask_token_id", "num_attention_heads", "num_key_value_heads")
_TINY = {"head_dim": 32, "intermediate_size": 96, "num_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
# What the in-process engine cannot roll back, and says so.
_NEEDS_VLLM = {
    **dict.fromkeys(["qwen3.5-27b", "qwen3.5-122b-a10b", "qwen3.6-27b", "qwen3.6-35b-a3b"], "linear_attention"),
    "qwen3-next": "linear_attention",
    "minimax-m3": "minimax_m3_sparse",
    "gemma4-e4b": "shared kv layers",
}

Make = Callable[[str], ResolvedTarget]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(name) -> the tiny target of this architecture, made once."""
    made: dict[str, ResolvedTarget] = {}

    def one(name: str) -> ResolvedTarget:
        if name not in made:
            folder = field_target(tmp_path_factory.mktemp(name), name)
            made[name] = resolve_target(TargetConfig(model=str(folder), dtype="float32"))
        return made[name]

    return one


def recipes_of(name: str) -> list[Path]:
    """The shipped recipes for a target of the field."""
    return sorted(RECIPES.glob(f"{name}-*.yaml"))


@pytest.mark.parametrize("name", FIELD)
def test_the_field_target_has_recipes(name: str) -> None:
    paths = recipes_of(name)
    assert paths, f"no recipe for {name}"
    for path in paths:
        assert path.stem == f"{name}-{load_recipe(path).method}"
        text = path.read_text(encoding="utf-8")
        header = " ".join(line.removeprefix("#") for line in text.split("\nname:")[0].splitlines())
        assert "mi300x-8.yaml" in header and "8 x H100" in header, "says which launch file it is for"
        assert "not run on" in header or "not yet run on" in header


@pytest.mark.parametrize("name", [*FIELD, *OTHERS])
def test_captured_states_are_the_targets_own(name: str, make: Make) -> None:
    target = make(name)
    frozen = FrozenTarget.load(target.path, torch.float32)
    rows = tiny_rows([24, 17])
    alone = TransformersSource(target, (0, 2, 3), "float32")
    for teacher in (frozen.logits, None):
        report = check_parity(alone, rows, target, teacher=teacher)
        assert report.top1_agreement == 1.0 and [figures.layer for figures in report.layers][:3] == [0, 2, 3]
    records = list(alone.capture(rows))
    embedded = frozen.embed(records[0].token_ids_T)
    torch.testing.assert_close(embedded, records[0].states_TLH[:, 0], rtol=1e-5, atol=1e-6)
    # Padding and neighbours change nothing, also where layers are recurrent or choose their experts.
    together = TransformersSource(target, (0, 2, 3), "float32", batch_rows=2).capture(rows)
    for one, other in zip(records, together, strict=True):
        torch.testing.assert_close(other.states_TLH, one.states_TLH, rtol=1e-3, atol=1e-4)


def _methods() -> list[tuple[str, str]]:
    shipped = [(name, load_recipe(path).method) for name in FIELD for path in recipes_of(name)]
    return shipped + [(name, "eagle3") for name in OTHERS]


@pytest.mark.parametrize(("name", "method"), _methods())
def test_two_steps_of_training_move_the_head(name: str, method: str, make: Make, tmp_path: Path) -> None:
    target = make(name)
    module, frozen = load_method(method), FrozenTarget.load(target.path, torch.float32)
    known = module.Config.model_fields
    settings: dict[str, Any] = {key: value for key, value in _TINY.items() if key in known}
    if name in FIELD:
        shipped = load_recipe(RECIPES / f"{name}-{method}.yaml").model.model_dump(exclude_unset=True)
        settings = {key: value for key, value in shipped.items() if key not in _OF_A_SIZE} | settings
    if "draft_vocab_size" in known:
        settings["draft_vocab_size"] = VOCAB // 2
    kept_ids = tiny_kept_ids(VOCAB // 2) if "draft_vocab_size" in known else None
    torch.manual_seed(0)
    head = module.Head(module.Config(**settings), frozen, kept_ids)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    rows = tiny_rows([40, 33])
    states = HiddenStatesConfig(mode="online", dtype="float32", device="cpu")
    config = TrainConfig(max_steps=2, learning_rate=1e-3, tokens_per_batch=48, precision="fp32")
    with open_stream(states, target, head.needs.aux_layers, rows, tmp_path / "states") as stream:
        result = fit(config, head, frozen, rows, stream, tmp_path / "train", None, save_weights=save_head)
    assert result.steps == 2 and result.num_skipped_steps == 0 and result.num_supervised > 0
    trained = load_head(result.weights, frozen).state_dict()
    moved = [key for key, value in trained.items() if not torch.equal(value, before[key])]
    assert len(moved) > len(before) // 2, "hardly a weight has moved"


@pytest.mark.parametrize("name", [*FIELD, *OTHERS])
def test_the_engine_answers_as_the_target_does_or_says_that_vllm_must(name: str, make: Make) -> None:
    ids = list(tiny_rows([40])[0].input_ids)
    prompts = [ids[:5], ids[5:25], ids[25:31]]  # one is longer than the sliding windows
    answers: dict[int, list[int]] = {}

    def answer() -> None:
        generate(
            load_model(make(name)),
            prompts,
            max_new_tokens=10,
            stop_ids=[],
            sampling=Sampling(),
            batch_size=2,
            on_finished=lambda found: answers.__setitem__(found.index, found.token_ids),
        )

    if name in _NEEDS_VLLM:
        with pytest.raises(ValueError, match=f"{_NEEDS_VLLM[name]}.*set responses.engine to vllm"):
            answer()
        return
    answer()
    model = load_model(make(name))
    for index, prompt in enumerate(prompts):
        whole = torch.tensor([[*prompt, *answers[index]]])
        with torch.no_grad():
            logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answers[index]
