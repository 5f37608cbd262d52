"""Models with an encoder and a decoder: T5, BART, Whisper."""

from typing import Any

import torch
from torch import nn

from tests.zoo.entries import SAMPLES, WORDS, Batch, Entry, Trained, generator, text, tokens

BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def pairs(**more: Any) -> Batch:
    source = text("right")
    return source | {"labels": torch.where(tokens(4) % 5 == 0, -100, tokens(4))} | more


def t5_model(**config: Any) -> nn.Module:
    import transformers

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    made = {**sizes, "vocab_size": WORDS, "dropout_rate": 0.0, "decoder_start_token_id": 0, **config}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**made))


def t5() -> Trained:
    return Trained(t5_model(), pairs())


def t5_gated() -> Trained:
    model = t5_model(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Trained(model, pairs())


def bart(**config: Any) -> Trained:
    import transformers

    made = transformers.BartConfig(**BART, max_position_embeddings=16, **config)
    return Trained(transformers.BartForConditionalGeneration(made), pairs())


def bart_eager() -> Trained:
    module = bart(attn_implementation="eager", use_cache=False)
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return module


def whisper() -> Trained:
    import transformers

    frames = torch.randn(SAMPLES, 8, 20, generator=generator(6), dtype=torch.float64)
    sizes = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**BART, **sizes))
    return Trained(model, {"input_features": frames, "labels": pairs()["labels"]})


NAME = "transformers"
ENTRIES = {
    "t5": Entry(t5, NAME, "T5", "an encoder, a decoder, one embedding for both; right padding", microbatches=3),
    "t5 gated": Entry(t5_gated, NAME, "T5", "gated, untied head, gradient checkpointing"),
    "t5 recomputed": Entry(
        t5, NAME, "T5", "`activation_checkpointing=True`", strategy={"activation_checkpointing": True}
    ),
    "bart": Entry(bart, NAME, "BART", "an encoder and a decoder, sdpa, `use_cache` as it comes"),
    "bart reentrant": Entry(
        bart_eager, NAME, "BART", "eager attention, `use_cache=False`, gradient checkpointing, `use_reentrant=True`"
    ),
    "whisper": Entry(whisper, NAME, "Whisper", "sound to text: convolutions, an encoder, a decoder"),
}
