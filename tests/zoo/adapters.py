"""``peft``: small trained parts on a frozen model."""

from typing import Any

from tests.zoo.decoders import build, checkpointed
from tests.zoo.entries import Entry, Trained, text

LINEAR = ["q_proj", "v_proj", "down_proj"]


def adapted(**config: Any) -> Trained:
    import peft

    made = peft.LoraConfig(r=3, lora_alpha=4, target_modules=LINEAR, init_lora_weights=False, **config)
    return Trained(peft.get_peft_model(build("Llama"), made), text("right"), shifted=True)


def lora() -> Trained:
    return adapted(task_type="CAUSAL_LM")


def lora_and_head() -> Trained:
    return adapted(modules_to_save=["lm_head", "embed_tokens"])


def lora_last_layer() -> Trained:
    return adapted(layers_to_transform=[2])


def lora_checkpointed() -> Trained:
    import peft

    model = checkpointed(build("Llama"), reentrant=True)
    model.enable_input_require_grads()
    made = peft.LoraConfig(r=3, target_modules=LINEAR, init_lora_weights=False)
    return Trained(peft.get_peft_model(model, made), text("right"), shifted=True)


NAME = "peft"
ENTRIES = {
    "lora": Entry(lora, NAME, "LoRA on Llama", "the base frozen", microbatches=3),
    "lora head": Entry(lora_and_head, NAME, "LoRA on Llama", "`modules_to_save`: head and embedding trained in full"),
    "lora last": Entry(lora_last_layer, NAME, "LoRA on Llama", "adapters in the last layer only: no backward above"),
    "lora reentrant": Entry(
        lora_checkpointed, NAME, "LoRA on Llama", "gradient checkpointing, `use_reentrant=True`, inputs that train"
    ),
}
