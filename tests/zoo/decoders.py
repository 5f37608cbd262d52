"""Language models that read from left to right: GPT-2, Llama, Mistral, Qwen2, Mixtral, Mamba."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entries import LENGTH, SAMPLES, WORDS, Batch, Entry, Trained, lengths, packed, text

SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def build(family: str, **config: Any) -> nn.Module:
    """A small ``{family}ForCausalLM``."""
    import transformers

    sizes = {**SIZES, **config}
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    """As users ask for it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def gpt2(data: Batch, **config: Any) -> Trained:
    sizes = {"n_embd": 12, "n_layer": 3, "n_head": 3, "n_positions": 16, "vocab_size": WORDS}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **dropouts, **config}))
    return Trained(model, data, shifted=True)


class Remembering(Trained):
    """Reads a row in two halves: the second sees the keys and values of the first."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        first = self.model(input_ids=ids[:, :4], labels=ids[:, :4], use_cache=True)
        second = self.model(input_ids=ids[:, 4:], labels=ids[:, 4:], past_key_values=first.past_key_values)
        loss = first.loss + second.loss
        self.log("loss", loss)
        return loss

    def micro_batch_weight(self, micro_batch: Batch) -> float:
        return float(len(micro_batch["input_ids"]))


class Regular(Trained):
    """A loss on the states between the layers too."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        out = self.model(**batch, output_hidden_states=True)
        loss = out.loss + 0.01 * sum(state.square().mean() for state in out.hidden_states)
        self.log("loss", loss)
        return loss


def plain_gpt2() -> Trained:
    return gpt2(text())


def gpt2_with_cache() -> Trained:
    return gpt2(text("right"), use_cache=True, attn_implementation="eager")


def gpt2_reentrant() -> Trained:
    module = gpt2(text())
    checkpointed(module.model, reentrant=True)
    return module


def gpt2_past() -> Trained:
    module = gpt2(text())
    return Remembering(module.model, module.data)


def llama() -> Trained:
    return Trained(build("Llama"), text(), shifted=True)


def llama_right() -> Trained:
    return Trained(build("Llama", attn_implementation="eager", use_cache=False), text("right"), shifted=True)


def llama_left() -> Trained:
    data = text("left")
    data["position_ids"] = (data["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return Trained(build("Llama", attn_implementation="sdpa"), data, shifted=True)


def llama_packed() -> Trained:
    return Trained(build("Llama", tie_word_embeddings=True), packed(), shifted=True)


def llama_masked_4d() -> Trained:
    """A mask that the user has made: which place sees which."""
    data = text()
    sees = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    own = torch.arange(LENGTH) >= LENGTH - lengths()[:, None]
    data["attention_mask"] = (sees & (own[:, None, :] == own[:, :, None])).view(SAMPLES, 1, LENGTH, LENGTH)
    return Trained(build("Llama"), data, shifted=True)


def llama_reentrant() -> Trained:
    return Trained(checkpointed(build("Llama"), reentrant=True), text("right"), shifted=True)


def llama_checkpointed() -> Trained:
    return Trained(checkpointed(build("Llama"), reentrant=False), text("left"), shifted=True)


def llama_states() -> Trained:
    return Regular(build("Llama"), text(), shifted=True)


def mistral() -> Trained:
    return Trained(build("Mistral", sliding_window=3), text("right"), shifted=True)


def qwen2() -> Trained:
    config = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2, "tie_word_embeddings": True}
    return Trained(build("Qwen2", **config), text("left"), shifted=True)


def mixtral(experts: str = "eager", **config: Any) -> Trained:
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": experts}
    return Trained(build("Mixtral", **sizes, **config), text("right"), shifted=True)


def mixtral_grouped() -> Trained:
    return mixtral("grouped_mm")


def mixtral_balanced() -> Trained:
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def mamba() -> Trained:
    return Trained(build("Mamba", state_size=4), text(), shifted=True)


def mamba_checkpointed() -> Trained:
    return Trained(checkpointed(build("Mamba", state_size=4), reentrant=False), text("right"), shifted=True)


NAME = "transformers"
COLLECTED = "Where a library collects it on demand (output_hidden_states, output_attentions, output_router_logits)"
ENTRIES = {
    "gpt2": Entry(plain_gpt2, NAME, "GPT-2", "labels; embedding and head tied", microbatches=3),
    "gpt2 cache": Entry(gpt2_with_cache, NAME, "GPT-2", "right padding, eager attention, `use_cache=True`"),
    "gpt2 reentrant": Entry(gpt2_reentrant, NAME, "GPT-2", "gradient checkpointing, `use_reentrant=True`"),
    "gpt2 past": Entry(
        gpt2_past,
        NAME,
        "GPT-2",
        "called twice, the second time with `past_key_values`",
        note="the cache stays where it is made: all blocks on one stage",
    ),
    "llama": Entry(llama, NAME, "Llama", "labels, sdpa, `use_cache` as it comes"),
    "llama right": Entry(
        llama_right, NAME, "Llama", "right padding, eager attention, `use_cache=False`", microbatches=3
    ),
    "llama left": Entry(llama_left, NAME, "Llama", "left padding, `position_ids`, sdpa"),
    "llama packed": Entry(llama_packed, NAME, "Llama", "packed rows by `position_ids`; embedding and head tied"),
    "llama 4d": Entry(llama_masked_4d, NAME, "Llama", "a mask of its own, four dims"),
    "llama reentrant": Entry(llama_reentrant, NAME, "Llama", "gradient checkpointing, `use_reentrant=True`"),
    "llama checkpointed": Entry(llama_checkpointed, NAME, "Llama", "gradient checkpointing, `use_reentrant=False`"),
    "mistral": Entry(mistral, NAME, "Mistral", "sliding window, right padding"),
    "qwen2": Entry(qwen2, NAME, "Qwen2", "sliding window in one layer of three, left padding, tied"),
    "mixtral": Entry(mixtral, NAME, "Mixtral", "eager experts"),
    "mixtral grouped": Entry(mixtral_grouped, NAME, "Mixtral", "grouped experts", precision="32-true", tolerance=1e-5),
    "mixtral balanced": Entry(
        mixtral_balanced,
        NAME,
        "Mixtral",
        "`output_router_logits=True`",
        precision="32-true",
        refused=COLLECTED,
        note="it collects values of layers by hooks; add the balancing loss in a layer, or train without it",
    ),
    "llama states": Entry(
        llama_states,
        NAME,
        "Llama",
        "`output_hidden_states=True`",
        refused=COLLECTED,
        note="it collects values of layers by hooks; use what the model returns",
    ),
    "mamba": Entry(mamba, NAME, "Mamba", "no attention at all"),
    "mamba checkpointed": Entry(
        mamba_checkpointed, NAME, "Mamba", "right padding, gradient checkpointing", microbatches=3
    ),
}
