"""Models that read everything at once: BERT, ViT, CLIP's two towers, and timm's ViT and ResNet."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import WORDS, Batch, Entry, Trained, classes, images, text, tokens

SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(head: str, data: Batch, **config: Any) -> Trained:
    import transformers

    sizes = {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
    made = transformers.BertConfig(**{**SIZES, **NO_DROPOUT, **sizes, **config})
    return Trained(getattr(transformers, head)(made), data)


def bert_words() -> Trained:
    return bert("BertForMaskedLM", text("right", token_type_ids=tokens() % 2))


def bert_class() -> Trained:
    data = {key: value for key, value in text("right").items() if key != "labels"}
    return bert(
        "BertForSequenceClassification", data | {"labels": classes()}, num_labels=5, attn_implementation="eager"
    )


def bert_checkpointed() -> Trained:
    module = bert_words()
    module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return module


def vit() -> Trained:
    import transformers

    config = transformers.ViTConfig(**SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5)
    return Trained(transformers.ViTForImageClassification(config), {"pixel_values": images(), "labels": classes()})


def clip_model() -> nn.Module:
    import transformers

    sizes = {**SIZES, "num_hidden_layers": 2}
    words = {**sizes, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config=words, vision_config={**sizes, "image_size": 16, "patch_size": 8}, projection_dim=12
    )
    return transformers.CLIPModel(config)


class OfSamples(Trained):
    """Its loss is a mean over samples."""

    def micro_batch_weight(self, micro_batch: Batch) -> float:
        return float(len(next(iter(micro_batch.values()))))


class Contrasting(OfSamples):
    """CLIP's own loss, over all pairs of a batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch, return_loss=True).loss
        self.log("loss", loss)
        return loss


class Matching(OfSamples):
    """A loss over each pair by itself."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        loss = (1 - (out.text_embeds * out.image_embeds).sum(-1)).mean()
        self.log("loss", loss)
        return loss


def pairs() -> Batch:
    return {key: value for key, value in text("right").items() if key != "labels"} | {"pixel_values": images()}


def clip_contrasting() -> Trained:
    return Contrasting(clip_model(), pairs())


def clip_matching() -> Trained:
    return Matching(clip_model(), pairs())


class Classifying(OfSamples):
    """A model of ``timm``, which returns logits."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["images"]), batch["labels"])
        self.log("loss", loss)
        return loss


class OnFixedStatistics(Classifying):
    """Fine-tuning with the statistics of BatchNorm left as they are."""

    def on_train_epoch_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def timm_model(name: str, **config: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **config)


def timm_vit() -> Trained:
    model = timm_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=12, depth=4, num_heads=3)
    return Classifying(model, {"images": images(), "labels": classes()})


def timm_vit_checkpointed() -> Trained:
    module = timm_vit()
    module.model.set_grad_checkpointing()
    return module


def resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 2, 1], num_classes=5, channels=(4, 8, 8, 12))


def resnet_data() -> Batch:
    return {"images": images(size=33), "labels": classes()}


def timm_resnet() -> Trained:
    return Classifying(resnet(), resnet_data())


def timm_resnet_fixed() -> Trained:
    model = resnet()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.fill_(1.7)
                module.running_mean.fill_(0.2)
    return OnFixedStatistics(model, resnet_data())


NAME = "transformers"
ENTRIES = {
    "bert": Entry(bert_words, NAME, "BERT", "masked words, right padding, `token_type_ids`", microbatches=3),
    "bert class": Entry(bert_class, NAME, "BERT", "sequence classification, eager attention"),
    "bert checkpointed": Entry(bert_checkpointed, NAME, "BERT", "gradient checkpointing, `use_reentrant=True`"),
    "vit": Entry(vit, NAME, "ViT", "image classification"),
    "clip pairs": Entry(clip_matching, NAME, "CLIP", "two towers, a loss over each pair"),
    "clip": Entry(
        clip_contrasting,
        NAME,
        "CLIP",
        "two towers, its own loss",
        microbatches=1,
        note="its loss is one over all pairs of a batch",
    ),
    "timm vit": Entry(timm_vit, "timm", "ViT", "image classification", microbatches=3),
    "timm vit checkpointed": Entry(timm_vit_checkpointed, "timm", "ViT", "`set_grad_checkpointing()`"),
    "timm resnet": Entry(
        timm_resnet,
        "timm",
        "ResNet",
        "BatchNorm in training",
        microbatches=1,
        note="with more micro-batches each has its own statistics, and a warning says so",
    ),
    "timm resnet fixed": Entry(
        timm_resnet_fixed, "timm", "ResNet", "BatchNorm in eval mode, as in fine-tuning", microbatches=3
    ),
}
