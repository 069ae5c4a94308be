"""A zoo of small networks, written as users write them, without regard to pruning.

`ZOO` maps a name to an `Entry`. The full-size networks are in `LARGE`; generated ones in `random_nets`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from . import attention, buffers, cnn, large, odd, sums, transformers

__all__ = ["LARGE", "ZOO", "Entry", "call", "cast", "shake", "tensors"]


@dataclass(frozen=True)
class Entry:
    """One network of the zoo.

    factory: builds a fresh float32 network; seed torch first for repeatable weights.
    example_inputs: a tensor, a tuple of positional arguments or a dictionary of keyword arguments, batch of 2.
    min_coverage: the share of FLOPs that must be shrinkable, or None where nothing is promised.
    without_grad: prefixes of parameter names that get no gradient in training.
    whole: modules whose output channels must all stay: the network reads their number, or a channel set to
        zero still takes part in what it computes. Only the clear cases are named; the output layer never is.
    """

    factory: Callable[[], nn.Module]
    example_inputs: Callable[[], Any]
    min_coverage: float | None = None
    without_grad: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


# --------------------------------------------------------------------------- inputs


def _randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _randint(high, *shape):
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _floats(*shape):
    return partial(_randn, *shape)


def _tokens(length=9, vocab=30):
    return partial(_randint, vocab, 2, length)


def _pair(first, second):
    return lambda: (first(), second())


_image = _floats(2, 3, 16, 16)
_sequence = _floats(2, 6, 5)


# --------------------------------------------------------------------------- helpers for tests


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model on what `example_inputs` gave."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    """The same inputs with every floating-point tensor in `dtype`."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: cast(value, dtype) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(cast(value, dtype) for value in inputs)
    return inputs


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors in an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors(value)]
    if isinstance(output, list | tuple):
        return [t for value in output for t in tensors(value)]
    return []


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter and running statistic away from its initial ones and zeros, in place.

    A fresh batch norm maps zero to zero and a fresh bias often is zero: both hide mistakes.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(like, low, high):
        drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return drawn.to(device=like.device, dtype=like.dtype)

    for p in model.parameters():
        if p.numel() and bool((p == p.flatten()[0]).all()):
            p.copy_(draw(p, 0.5, 1.5) if p.flatten()[0] > 0.5 else draw(p, -0.5, 0.5))
    for name, b in model.named_buffers():
        if name.endswith(("running_mean", ".mean")) or name == "mean":
            b.copy_(draw(b, -0.5, 0.5))
        elif name.endswith(("running_var", ".var")) or name == "var":
            b.copy_(draw(b, 0.5, 2.0))
    return model


# --------------------------------------------------------------------------- the zoo

ZOO: dict[str, Entry] = {
    # cnn
    "vgg_bn": Entry(cnn.VGG, _image, 0.95),
    "vgg_plain": Entry(cnn.VGGPlain, _image, 0.95),
    "resnet_basic": Entry(cnn.ResNet, _image, 0.95),
    "resnet_option_a": Entry(cnn.ResNetOptionA, _image, 0.95),
    "resnet_bottleneck": Entry(partial(cnn.ResNet, cnn.Bottleneck, (2, 1), (4, 6)), _image, 0.95),
    "resnet_zero_init": Entry(partial(cnn.ResNet, layers=(2, 1, 1), zero_init_residual=True), _image, 0.95),
    "resnet_group_norm": Entry(partial(cnn.ResNet, norm_layer=cnn.group_norm), _image),
    "resnet_se_conv": Entry(partial(cnn.ResNet, cnn.SEConvBlock), _image),
    "resnet_se_linear": Entry(partial(cnn.ResNet, cnn.SELinearBlock), _image),
    "wide_resnet": Entry(cnn.WideResNet, _image, 0.95),
    "resnext": Entry(partial(cnn.ResNet, cnn.Bottleneck, (2, 1), (4, 6), groups=4, mid_ratio=2), _image, 0.95),
    "mobilenet_v1": Entry(cnn.MobileNetV1, _image, 0.95),
    "mobilenet_v2": Entry(cnn.MobileNetV2, _image, 0.95),
    "shufflenet_v2": Entry(cnn.ShuffleNetV2, _image),
    "densenet": Entry(cnn.DenseNet, _image, 0.95),
    "inception": Entry(cnn.Inception, _image),
    "inception_aux": Entry(partial(cnn.Inception, aux=True), _image),
    "unet_transposed": Entry(cnn.UNet, _image),
    "unet_interpolate": Entry(partial(cnn.UNet, bilinear=True), _image),
    "cat_flatten": Entry(cnn.CatFlatten, _image),
    "pixel_shuffle": Entry(cnn.SuperResolution, _floats(2, 3, 8, 8)),
    "instance_norm": Entry(cnn.InstanceNormNet, _image),
    "prelu_hardswish": Entry(cnn.PReLUHardswish, _image),
    "convnext": Entry(cnn.ConvNeXt, _image),
    "conv1d": Entry(cnn.Conv1dNet, _floats(2, 4, 16)),
    "conv3d": Entry(cnn.Conv3dNet, _floats(2, 2, 4, 8, 8)),
    "mean_pool": Entry(cnn.MeanPoolNet, _image),
    "glu": Entry(cnn.GatedConvNet, _image),
    "uneven_split": Entry(cnn.UnevenSplit, _image),
    "stack_unbind": Entry(cnn.StackUnbind, _image),
    "dilated": Entry(cnn.DilatedNet, _image),
    "depth_multiplier": Entry(cnn.DepthMultiplier, _image),
    "maxout": Entry(cnn.Maxout, _image),
    "channel_softmax": Entry(cnn.ChannelSoftmax, _image, whole=("assign",)),
    "cbam": Entry(cnn.CBAMNet, _image, whole=("conv",)),
    "non_local": Entry(cnn.NonLocal, _image),
    # transformers
    "mlp": Entry(transformers.MLP, _floats(2, 12)),
    "mlp_batch_norm": Entry(partial(transformers.MLP, batch_norm=True), _floats(2, 12)),
    "mlp_mixer": Entry(transformers.MLPMixer, _image, whole=("embed",)),
    "vit_fused": Entry(transformers.ViT, _image, whole=("patch_embed",)),
    "vit_separate": Entry(partial(transformers.ViT, transformers.SeparateAttention), _image, whole=("patch_embed",)),
    "vit_product": Entry(
        partial(transformers.ViT, transformers.ProductAttention), _image, 0.95, whole=("patch_embed",)
    ),
    "decoder_repeat_interleave": Entry(transformers.Decoder, _tokens(), whole=("tok",)),
    "decoder_expand": Entry(partial(transformers.Decoder, "expand"), _tokens(), whole=("tok",)),
    "nanogpt": Entry(transformers.NanoGPT, _tokens(), whole=("transformer.wte", "transformer.wpe")),
    "nanogpt_loss": Entry(
        transformers.NanoGPT, _pair(_tokens(), _tokens(9, 20)), whole=("transformer.wte", "transformer.wpe")
    ),
    "encoder_decoder": Entry(transformers.EncoderDecoder, _sequence, whole=("inp",)),
    "encoder_stack": Entry(transformers.EncoderStack, _sequence, whole=("inp",)),
    "encoder_stack_prenorm": Entry(transformers.PreNormEncoderStack, _sequence, whole=("inp",)),
    "multihead_attention": Entry(transformers.MHABlock, _pair(_sequence, _floats(2, 4, 7)), whole=("inp",)),
    "gpt2_conv1d": Entry(transformers.Conv1DFFN, _floats(2, 6, 12)),
    "functional_linear": Entry(transformers.FunctionalLinear, _floats(2, 12)),
    "einsum_ffn": Entry(transformers.EinsumFFN, _floats(2, 6, 12)),
    "einsum_attention": Entry(transformers.EinsumAttention, _floats(2, 6, 12)),
    # attention
    "compared_head_width": Entry(partial(attention.Residual, attention.ComparesHeadWidth), _sequence, 0.95),
    "shared_keys": Entry(partial(attention.Residual, attention.SharedKeys), _sequence, 0.95),
    "configured_heads": Entry(partial(attention.Residual, attention.configured_layers), _sequence, 0.95),
    "indexed_qkv": Entry(partial(attention.Residual, attention.Indexed), _sequence, 0.95),
    "flat_batch_norm": Entry(attention.FlatNormStream, _sequence, 0.95),
    "cached_bias": Entry(partial(attention.Residual, attention.CachedBias), _sequence, 0.95),
    "bias_table": Entry(partial(attention.Residual, partial(attention.BiasTable, fused=False)), _sequence, 0.95),
    "bias_table_fused": Entry(partial(attention.Residual, attention.BiasTable), _sequence, 0.95),
    "bucket_embedding": Entry(partial(attention.Residual, attention.BucketEmbedding), _sequence, 0.95),
    "expanded_gate": Entry(attention.ExpandedGate, _image, 0.9, whole=("gate",)),
    "input_width": Entry(partial(attention.Residual, attention.InputWidth), _sequence, 0.95),
    "one_head": Entry(partial(attention.Residual, attention.OneHead), _sequence),
    "scaled_head": Entry(partial(attention.Residual, attention.ScaledHead), _sequence, 0.95),
    "joined_bias": Entry(partial(attention.Residual, attention.JoinedBias), _sequence, 0.95),
    "split_list": Entry(partial(attention.MixedKernels, list), _image, 0.95),
    "split_tuple": Entry(partial(attention.MixedKernels, tuple), _image, 0.95),
    "zero_bias": Entry(partial(attention.Residual, attention.ZeroBias), _sequence, 0.95),
    "added_slopes": Entry(partial(attention.Residual, attention.AddedSlopes), _sequence, 0.95),
    "shifted_window": Entry(partial(attention.Residual, attention.ShiftedWindow), _sequence, 0.95),
    "computed_bias": Entry(partial(attention.Residual, attention.ComputedBias), _sequence, 0.95),
    "channel_attention": Entry(partial(attention.Residual, attention.ChannelAttention), _sequence, 0.95),
    "interleaved_rotation": Entry(partial(attention.Residual, attention.InterleavedRotation), _sequence, 0.95),
    "complex_rotation": Entry(partial(attention.Residual, attention.ComplexRotation), _sequence, 0.95),
    "head_parameters": Entry(partial(attention.Residual, attention.HeadParameters), _sequence, 0.95),
    "interleaved_gate": Entry(partial(attention.Residual, attention.InterleavedGate), _sequence, 0.95),
    "batched_experts": Entry(partial(attention.Residual, attention.BatchedExperts), _sequence, 0.95),
    "windows_after_heads": Entry(partial(attention.Residual, attention.WindowsAfterHeads), _sequence, 0.95),
    "bias_shape": Entry(partial(attention.Residual, attention.BiasShape), _sequence, 0.95),
    "shape_of_before": Entry(attention.ShapeOfBefore, _sequence, 0.95),
    "upcast_norm": Entry(attention.UpcastNorm, _sequence),
    "class_token": Entry(attention.ClassToken, _sequence, 0.95),
    "learned_queries": Entry(attention.LearnedQueries, _sequence),
    "learned_queries_read_first": Entry(partial(attention.LearnedQueries, normed=False), _sequence),
    "resized_positions": Entry(attention.ResizedPositions, _image),
    "key_value_cache": Entry(partial(attention.Residual, attention.Cached), _sequence, 0.95),
    # buffers
    "state_space": Entry(buffers.StateSpace, _sequence, 0.95),
    "preallocated": Entry(buffers.Preallocated, _sequence, 0.95),
    "changed_through_view": Entry(buffers.ChangedThroughView, _sequence),
    "created_width": Entry(buffers.CreatedWidth, _sequence, 0.95),
    "partly_written": Entry(buffers.PartlyWritten, _sequence),
    "computed_size": Entry(buffers.ComputedSize, _sequence, whole=("inp",)),
    "outer_product": Entry(buffers.OuterProduct, _sequence, 0.85),
    # sums
    "listed_vit": Entry(sums.ListedViT, _image),
    "listed_mixer": Entry(sums.ListedMixer, _image),
    "summed_conv_net": Entry(sums.SummedConvNet, _image),
    "summed_gpt": Entry(sums.SummedGPT, _tokens()),
    # odd
    "shared_conv": Entry(odd.SharedConv, _image),
    "siamese": Entry(odd.Siamese, _pair(_image, _floats(2, 3, 16, 12))),
    "tied_autoencoder": Entry(odd.TiedAutoencoder, _floats(2, 12)),
    "two_heads": Entry(odd.TwoHeads, _image),
    "frozen_layer": Entry(odd.FrozenLayer, _image),
    "unread_conv": Entry(odd.UnreadConv, _image, without_grad=("unread.",)),
    "item_control": Entry(odd.ItemControl, _image),
    "dict_io": Entry(odd.DictModel, lambda: {"image": _image(), "table": _randn(2, 4), "temperature": 2.0}),
    "batch_dict": Entry(odd.BatchDict, lambda: ({"image": _image(), "table": _randn(2, 4)},)),
    "nested_outputs": Entry(odd.NestedOutputs, _pair(_image, _floats(1))),
    "returns_stream": Entry(odd.ReturnsStream, _image, whole=("stem", "block1.2", "block2.2")),
    "residual_chain": Entry(odd.ResidualChain, _image),
    "sigmoid_residual": Entry(odd.SigmoidResidual, _image),
    "multiplicative_residual": Entry(odd.MultiplicativeResidual, _image),
    "position_constant": Entry(odd.PositionConstant, _image),
    "noise_buffer": Entry(odd.NoiseBuffer, _image),
    "in_place": Entry(odd.InPlace, _image),
    "in_place_slice": Entry(odd.InPlaceSlice, _image),
    "functional_batch_norm": Entry(odd.FunctionalBatchNorm, _image),
    "weight_standardised": Entry(odd.WeightStandardised, _image),
    "standardised_convs": Entry(odd.StandardisedConvs, _image),
    "standardised_convs_gain": Entry(partial(odd.StandardisedConvs, gain=True), _image),
    "weight_norm": Entry(odd.WeightNorm, _image, 0.95),
    "hard_coded_view": Entry(odd.HardCodedView, _image, whole=("conv2",)),
    "hard_coded_flatten": Entry(odd.HardCodedFlatten, _image, whole=("conv2",)),
    "size_as_number": Entry(odd.SizeAsNumber, _image, whole=("conv2",)),
    "numpy_side": Entry(odd.NumpySide, _image),
    "numpy_feedback": Entry(odd.NumpyFeedback, _image, whole=("conv1",)),
    "fancy_index": Entry(odd.FancyIndex, _image),
    "index_select": Entry(odd.IndexSelect, _image),
    "flip_channels": Entry(odd.FlipChannels, _image),
    "every_second": Entry(odd.EverySecond, _image),
    "narrow_channels": Entry(odd.NarrowChannels, _image),
    "roll_channels": Entry(odd.RollChannels, _image),
    "pad_channels": Entry(odd.PadChannels, _image),
    "cumsum_channels": Entry(odd.CumsumChannels, _image, whole=("conv1",)),
    "sort_channels": Entry(odd.SortChannels, _image),
    "fourier_channels": Entry(odd.FourierChannels, _image, whole=("conv1",)),
    "repeat_channels": Entry(odd.RepeatChannels, _image),
    "normalise_channels": Entry(odd.NormaliseChannels, _image, 0.95),
    "summed_channels": Entry(odd.SummedChannels, _image, whole=("conv1",)),
    "compared_pixels": Entry(odd.ComparedPixels, _image, whole=("conv1",)),
    "lstm_head": Entry(odd.RecurrentHead, _image, whole=("rnn",)),
    "gru_head": Entry(partial(odd.RecurrentHead, "gru"), _image, whole=("rnn",)),
    "text_classifier": Entry(odd.TextClassifier, _tokens()),
    "embedding_bag": Entry(odd.BagClassifier, _tokens()),
    "custom_function": Entry(odd.CustomFunction, _image),
    "where_branches": Entry(odd.WhereBranches, _image),
    "bilinear_layer": Entry(odd.BilinearLayer, _pair(_floats(2, 6), _floats(2, 5))),
    "softmax_inside": Entry(odd.SoftmaxInside, _image, whole=("first",)),
    "expert_mixture": Entry(odd.ExpertMixture, _floats(2, 12), whole=("gate",)),
    "grouped_upsampling": Entry(cnn.GroupedUpsampling, _image, 0.95),
    "dropout2d": Entry(odd.Dropout2dNet, _image),
    "bilinear_pooling": Entry(odd.BilinearPooling, _image),
    "einsum_contraction": Entry(odd.EinsumContraction, _image),
}

LARGE: dict[str, Entry] = {
    "resnet50": Entry(large.resnet50, _floats(2, 3, 224, 224), 0.95),
    "vit_large": Entry(large.vit_large, _floats(2, 3, 224, 224)),
    "vgg19_bn": Entry(large.vgg19_bn, _floats(2, 3, 32, 32), 0.95),
}
