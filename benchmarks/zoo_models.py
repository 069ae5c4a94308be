"""The models of `zoo.py`: 117 of torchvision, timm and transformers, with random weights and small inputs.

Models of torchvision and timm are named as their packages name them. Those of transformers have a small configuration:
two layers, four heads, and a width of 64 unless their class asks for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Entry:
    """A model to try.

    Attributes:
        package: "torchvision", "timm" or "transformers".
        name: of the model in its package.
        attention: whether it has attention between positions, with heads.
        build: makes the model; the seed is set by the caller.
        inputs: makes example inputs.
    """

    package: str
    name: str
    attention: bool
    build: Callable[[], nn.Module] = field(repr=False)
    inputs: Callable[[], Any] = field(repr=False)


def _images(size: int) -> Callable[[], Any]:
    return lambda: torch.randn(2, 3, size, size)


def _torchvision(name: str, size: int = 64, **settings: Any) -> Entry:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, num_classes=10, weights=None, **settings)
        return model

    return Entry("torchvision", name, False, build, _images(size))


def _timm(name: str, size: int = 64, attention: bool = False, **settings: Any) -> Entry:
    def build() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10, **settings)
        return model

    return Entry("timm", name, attention, build, _images(size))


def _class(place: str, size: int = 64, attention: bool = False, variant: str = "", **settings: Any) -> Entry:
    """A model made by its class, "module.Class", where settings cannot be given by name."""
    module, _, name = place.rpartition(".")

    def build() -> nn.Module:
        home = import_module(module)
        found = {key: getattr(home, value) if key in _PARTS else value for key, value in settings.items()}
        model: nn.Module = getattr(home, name)(num_classes=10, **found)
        return model

    return Entry(module.partition(".")[0], f"{name}{variant}", attention, build, _images(size))


def _convnext() -> nn.Module:
    from torchvision.models import convnext

    blocks = ((16, 32, 1), (32, 48, 1), (48, 64, 1), (64, None, 1))
    model: nn.Module = convnext.ConvNeXt([convnext.CNBlockConfig(*block) for block in blocks], num_classes=10)
    return model


_BIT = {"stem_type": "fixed", "norm_layer": "GroupNormAct", "conv_layer": "StdConv2d"}
# Settings that name a class in the module of the model's class.
_PARTS = (
    "block", "block_layer", "norm_layer", "token_mixers", "norm_layers", "conv_layer", "mlp_layer", "downsample_layer",
)  # fmt: skip


def _tokens(**others: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_ids": torch.randint(3, 96, (2, 12)), **{k: make() for k, make in others.items()}}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


_TEXT = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_TEXT, "intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_ENCODER = {**_TEXT, "intermediate_size": 128, "pad_token_id": 0}
_IMAGES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def _transformers(
    model: str,
    config: str,
    settings: dict[str, Any],
    inputs: Callable[[], Any] | None = None,
    attention: bool = True,
    **others: Any,
) -> Entry:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings, **others))
        return made

    return Entry("transformers", model, attention, build, inputs or _tokens())


def _audio(length: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(2, length)}


def _clip(model: str, config: str, config_of: dict[str, dict[str, Any]], inputs: Callable[[], Any]) -> Entry:
    return _transformers(model, config, {}, inputs, **config_of)


_T5 = {
    "vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_WAV = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip

_PAIR = _tokens(decoder_input_ids=lambda: torch.randint(3, 96, (2, 10)))
_CLIP_TEXT = {**_ENCODER, "max_position_embeddings": 16, "projection_dim": 64, "eos_token_id": 2, "bos_token_id": 1}

_V = "torchvision.models"
_WIDE = (128, 128, 256, 256)
_FOUR = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)}
_RESNET = {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64)}
_NEXT = {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)}
_VIT: dict[str, Any] = {"attention": True, "img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4}
_SWIN: dict[str, Any] = {"attention": True, "depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)}

MODELS: tuple[Entry, ...] = (
    _class(f"{_V}.resnet.ResNet", variant=" (basic blocks)", block="BasicBlock", layers=[1, 1, 1, 1]),
    _class(
        f"{_V}.resnet.ResNet", variant=" (bottlenecks)", block="Bottleneck", layers=[1, 1, 1, 1], width_per_group=16,
    ),
    _class(
        f"{_V}.resnet.ResNet", variant=" (ResNeXt)", block="Bottleneck", layers=[1, 1, 1, 1], groups=8,
        width_per_group=4,
    ),
    _class(f"{_V}.densenet.DenseNet", growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16),
    _torchvision("squeezenet1_0"),
    _torchvision("squeezenet1_1"),
    _torchvision("googlenet", aux_logits=False, init_weights=False),
    _torchvision("mobilenet_v2", width_mult=0.35),
    _torchvision("mobilenet_v3_small"),
    _torchvision("mobilenet_v3_large", width_mult=0.5),
    _torchvision("mnasnet0_5"),
    _torchvision("shufflenet_v2_x0_5"),
    _torchvision("efficientnet_b0"),
    _torchvision("regnet_x_400mf"),
    _torchvision("regnet_y_400mf"),
    _torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
    Entry("torchvision", "ConvNeXt", False, _convnext, _images(64)),
    _class(
        f"{_V}.vision_transformer.VisionTransformer", 32, True, image_size=32, patch_size=8, num_layers=2, num_heads=4,
        hidden_dim=64, mlp_dim=128,
    ),
    _class(
        f"{_V}.swin_transformer.SwinTransformer", 64, True, patch_size=[4, 4], embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=[4, 4],
    ),
    _class(
        f"{_V}.swin_transformer.SwinTransformer", 64, True, " V2", patch_size=[4, 4], embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=[4, 4], block="SwinTransformerBlockV2", downsample_layer="PatchMergingV2",
    ),
    _class(
        f"{_V}.maxvit.MaxVit", 32, True, input_size=(32, 32), stem_channels=16, partition_size=4,
        block_channels=[16, 32], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0,
    ),
    _timm("resnet26d", **_RESNET),
    _timm("test_resnet"),
    _class("timm.models.resnetv2.ResNetV2", variant=" (BiT)", layers=(1, 1, 1, 1), channels=_WIDE, **_BIT),
    _timm("seresnet18", channels=(16, 32, 48, 64)),
    _timm("skresnet18", channels=(16, 32, 48, 64)),
    _timm("resnest14d", channels=(16, 32, 48, 64)),
    _timm("res2net50_26w_4s", **_RESNET),
    _timm("ese_vovnet19b_slim_dw"),
    _timm("dla46x_c"),
    _timm("cs3darknet_s"),
    _timm("ghostnet_050"),
    _timm("mixnet_s"),
    _timm("lcnet_035"),
    _timm("rexnet_100", width_mult=0.3),
    _timm("tinynet_e"),
    _timm("mobilenetv4_conv_small_035"),
    _timm("test_efficientnet"),
    _timm("test_efficientnet_gn"),
    _timm("test_efficientnet_ln"),
    _timm("test_byobnet"),
    _timm("test_nfnet"),
    _timm("nf_regnet_b0", width_factor=0.25),
    _timm("repvit_m0_9", embed_dim=(16, 32, 48, 64), depth=(1, 1, 2, 1)),
    _timm("regnety_002"),
    _timm("test_convnext"),
    _timm("convnext_atto", **_NEXT),
    _timm("convnextv2_atto", **_NEXT),
    _timm("inception_next_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 128)),
    _timm("starnet_s1", depths=(1, 1, 2, 1), base_dim=16),
    _timm("fasternet_t0", depths=(1, 1, 2, 1), embed_dim=16),
    _class("timm.models.focalnet.FocalNet", depths=(1, 1, 2, 1), embed_dim=16),
    _class("timm.models.metaformer.MetaFormer", token_mixers="Pooling", norm_layers="GroupNorm1", **_NEXT),
    _timm("mambaout_femto", **_NEXT),
    _class("timm.models.mlp_mixer.MlpMixer", img_size=64, num_blocks=2, embed_dim=64),
    _class(
        "timm.models.mlp_mixer.MlpMixer", variant=" (ResMLP)", img_size=64, num_blocks=2, embed_dim=64,
        mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine",
    ),
    _class(
        "timm.models.mlp_mixer.MlpMixer", variant=" (gMLP)", img_size=64, num_blocks=2, embed_dim=64, mlp_ratio=6,
        mlp_layer="GatedMlp", block_layer="SpatialGatingBlock",
    ),
    _timm("mobilevitv2_050"),
    _timm("swiftformer_xs", layers=(1, 1, 2, 1), embed_dims=(16, 32, 48, 64)),
    _timm("efficientvit_b0"),
    _timm("vit_tiny_patch16_224", **_VIT),
    _timm("deit_tiny_distilled_patch16_224", **_VIT),
    _timm("beit_base_patch16_224", **_VIT),
    _timm("cait_xxs24_224", **_VIT),
    _timm("xcit_nano_12_p16_224", **_VIT),
    _timm("eva02_tiny_patch14_224", 56, **_VIT | {"img_size": 56}),
    _timm("convit_tiny", **_VIT | {"embed_dim": 16, "local_up_to_layer": 1}),
    _timm("crossvit_tiny_240", 240, True, embed_dim=(32, 64), num_heads=(2, 4), depth=((1, 1, 0), (1, 1, 0))),
    _timm("tnt_s_legacy_patch16_224", 64, True, img_size=64, depth=2, embed_dim=96),
    _timm("swin_tiny_patch4_window7_224", 112, img_size=112, **_SWIN),
    _timm("swinv2_tiny_window8_256", img_size=64, **_SWIN),
    _timm("swinv2_cr_tiny_ns_224", 112, img_size=112, **_SWIN),
    _timm("pvt_v2_b0", 64, True, **_FOUR),
    _timm("twins_pcpvt_small", 64, True, img_size=64, **_FOUR),
    _timm("twins_svt_small", 64, True, img_size=64, **_FOUR),
    _timm("davit_tiny", 64, True, **_FOUR),
    _timm("tiny_vit_5m_224", 64, True, **_FOUR),
    _timm("levit_128s", 224, True, depth=(1, 1, 1), embed_dim=(32, 48, 64), num_heads=(2, 3, 4)),
    _timm("efficientformer_l1", 224, True, depths=(1, 1, 1, 2), embed_dims=(16, 32, 48, 64)),
    _timm("coatnet_pico_rw_224", 64, True, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64)),
    _timm("maxvit_rmlp_pico_rw_256", 64, True, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64)),
    _timm("mobilevit_xxs", 64, True),
    _timm("edgenext_xx_small", 64, True, depths=(1, 1, 2, 1)),
    _timm("efficientvit_m0", 224, True),
    _timm("hiera_tiny_224", 64, True, img_size=64, stages=(1, 1, 1, 1), embed_dim=16),
    _timm("visformer_tiny", 64, True, img_size=64, depth=(1, 2, 1), embed_dim=64, num_heads=4),
    _class(
        "timm.models.nest.Nest", 64, True, img_size=64, patch_size=4, num_levels=3, depths=(1, 1, 2),
        embed_dims=(32, 32, 64), num_heads=(2, 2, 4),
    ),
    _transformers("BertForSequenceClassification", "BertConfig", _ENCODER),
    _transformers("RobertaForMaskedLM", "RobertaConfig", _ENCODER),
    _transformers("ElectraForSequenceClassification", "ElectraConfig", _ENCODER),
    _transformers("AlbertForMaskedLM", "AlbertConfig", _ENCODER, embedding_size=32),
    _transformers(
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {"vocab_size": 96, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    _transformers("DebertaV2ForMaskedLM", "DebertaV2Config", _ENCODER),
    _transformers("ModernBertForMaskedLM", "ModernBertConfig", _DECODER, cls_token_id=1, sep_token_id=2),
    _transformers("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER),
    _transformers(
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128,
         "word_embed_proj_dim": 64},
    ),
    _transformers("BloomForCausalLM", "BloomConfig", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    _transformers("FalconForCausalLM", "FalconConfig", _TEXT),
    _transformers("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    _transformers("MistralForCausalLM", "MistralConfig", _GROUPED),
    _transformers("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    _transformers("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, head_dim=16),
    _transformers("GemmaForCausalLM", "GemmaConfig", _GROUPED, head_dim=16),
    _transformers("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    _transformers("MixtralForCausalLM", "MixtralConfig", _GROUPED, num_local_experts=4),
    _transformers(
        "MambaForCausalLM", "MambaConfig", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2},
        attention=False,
    ),
    _transformers("T5ForConditionalGeneration", "T5Config", _T5, _PAIR),
    _transformers("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, _PAIR),
    _transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", _SEQ2SEQ,
        lambda: {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": torch.randint(3, 96, (2, 10))},
        num_mel_bins=16, max_source_positions=32, max_target_positions=32,
    ),
    _transformers("Wav2Vec2ForCTC", "Wav2Vec2Config", _WAV, _audio(1600)),
    _transformers("ViTForImageClassification", "ViTConfig", _IMAGES, _pixels),
    _transformers("Dinov2ForImageClassification", "Dinov2Config", _IMAGES, _pixels),
    _transformers(
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        _pixels,
    ),
    _transformers(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        {"num_labels": 5, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32,
         "num_attention_heads": [1, 2, 4, 4]},
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64)},
    ),
    _transformers(
        "ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
        _pixels, attention=False,
    ),
    _clip(
        "CLIPModel", "CLIPConfig",
        {"text_config": _CLIP_TEXT, "vision_config": {**_IMAGES, "projection_dim": 64}},
        lambda: {**_tokens()(), **_pixels()},
    ),
)  # fmt: skip
