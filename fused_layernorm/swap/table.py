# SPDX-License-Identifier: Apache-2.0
"""The LayerNorm classes of other libraries, and what the source of each one's forward computes.

swap_layer_norm looks a class up by the names of its module and of itself, so no library is
imported. A class whose forward has a source that is not listed for it is not swapped.
`python ci/layer_norm_sources.py FOLDER` lists the classes and digests of any version of a package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import forwards, modulated
from .source import INHERITED

# From the digest of a forward's source (source.digest) to the forward that replaces it.
Sources = dict[str, Callable[..., Any]]

_LAST_DIMS: Sources = {INHERITED: forwards.last_dims}

# timm 0.9.16 to 1.0.31
_TIMM: Sources = {"9ed62333de30515c": forwards.timm_last_dims}
_TIMM_ACT: Sources = {"e64a4ebf3f4690fe": forwards.timm_last_dims_act}
_TIMM_FP32: Sources = {"6ddb609b31e0ad34": forwards.timm_float32}
_TIMM_FP32_ACT: Sources = {"833d6cd8a9829dec": forwards.timm_float32_act}
_TIMM_2D: Sources = {"79f26c715f41cfb4": forwards.timm_channels_first}
_TIMM_2D_ACT: Sources = {"e4b35ecfd6e2c68c": forwards.timm_channels_first_act}
_TIMM_2D_FP32: Sources = {"470ab09330b1e9b4": forwards.timm_float32_channels_first}
_TIMM_2D_FP32_ACT: Sources = {"534a3be2dac9959c": forwards.timm_float32_channels_first_act}
_TIMM_EXP_2D: Sources = {"e15c1807eff808ab": forwards.timm_exp2d}  # from 1.0

# torchvision 0.25 to 0.29, diffusers 0.30 to 0.42
_TORCHVISION_2D: Sources = {"e35a0c84f522d0d0": forwards.channels_first}
_DIFFUSERS_2D: Sources = {"b8368036ad147b67": forwards.channels_first}

# diffusers 0.30 to 0.42
_COGVIEW4_ZERO: Sources = {
    "1af89a8ef57df395": modulated.cogview4_zero,
    "442855f4498819c9": modulated.cogview4_zero_033,
}
_COGVIEW4_CONTINUOUS: Sources = {"1a65221adbc46d72": modulated.cogview4_continuous}

# transformers 4.49 to 5.23
_DATA_FORMAT: Sources = {
    "c5771f134ac1e446": forwards.data_format,
    "ab6b0c69f427ea68": forwards.data_format_by_hand,  # before 5.0
}
_EOMT_2D: Sources = {"26e1adbf9895dc43": forwards.transformers_channels_first}
_COHERE: Sources = {"0cdd061c391274fc": forwards.float32_without_bias}
_NEMOTRON: Sources = dict.fromkeys(
    (
        "0abf9e58ecda9739",
        "cfaa4376d3cc18ef",
        "6574c9893600178c",
        "69391390c4a7994a",
        "0e2a31be74dbd94a",
        "5c6406639681a5e1",
    ),
    forwards.weight_plus_one_outside_autocast,
)
_ESM: Sources = dict.fromkeys(
    ("956c45a98aa4def4", "5f6256884cf0867e", "466226a4874aaf9a"), forwards.esmfold
)


def _transformers(name: str, classes: dict[str, Sources]) -> dict[tuple[str, str], Sources]:
    folder, _, file = name.partition(".")
    module = f"transformers.models.{folder}.modeling_{file or folder}"
    return {(module, cls): sources for cls, sources in classes.items()}


def _diffusers(module: str, classes: dict[str, Sources]) -> dict[tuple[str, str], Sources]:
    return {(f"diffusers.models.{module}", cls): sources for cls, sources in classes.items()}


# By (module, class).
CLASSES: dict[tuple[str, str], Sources] = {
    ("timm.layers.norm", "LayerNorm"): _TIMM,
    ("timm.layers.norm", "LayerNormFp32"): _TIMM_FP32,
    ("timm.layers.norm", "LayerNorm2d"): _TIMM_2D,
    ("timm.layers.norm", "LayerNorm2dFp32"): _TIMM_2D_FP32,
    ("timm.layers.norm", "LayerNormExp2d"): _TIMM_EXP_2D,
    ("timm.layers.norm_act", "LayerNormAct"): _TIMM_ACT,
    ("timm.layers.norm_act", "LayerNormActFp32"): _TIMM_FP32_ACT,
    ("timm.layers.norm_act", "LayerNormAct2d"): _TIMM_2D_ACT,
    ("timm.layers.norm_act", "LayerNormAct2dFp32"): _TIMM_2D_FP32_ACT,
    ("timm.models.metaformer", "LayerNormNoBias"): _LAST_DIMS,
    ("timm.models.metaformer", "LayerNorm2dNoBias"): _TIMM_2D,
    ("torchvision.models.convnext", "LayerNorm2d"): _TORCHVISION_2D,
    **_diffusers(
        "normalization",
        {
            "AdaLayerNorm": {"fbcdc9f74fcac789": modulated.ada_layer_norm_by_timestep},
            "AdaLayerNormContinuous": {"961af26f6e036213": modulated.continuous},
            "AdaLayerNormZero": {"072840286b6a1e18": modulated.zero},
            "AdaLayerNormZeroSingle": {"3b705ecdc0cc1898": modulated.zero_single},
            "CogVideoXLayerNormZero": {"0dda031af00ff245": modulated.cogvideox_zero},
            "CogView3PlusAdaLayerNormZeroTextImage": {"43432242074f5369": modulated.text_and_image},
            "FP32LayerNorm": {"af7a0dca50e92d88": forwards.diffusers_float32},
            "LuminaLayerNormContinuous": {"eaab430818850a35": modulated.lumina_continuous},
            "SD35AdaLayerNormZeroX": {"4f33ed13df517b4f": modulated.zero_x},
        },
    ),
    **_diffusers(
        "transformers.hunyuan_transformer_2d",
        {"AdaLayerNormShift": {"45eb5d767685e228": modulated.hunyuan_shift}},
    ),
    **_diffusers(
        "transformers.transformer_chroma",
        {
            "ChromaAdaLayerNormContinuousPruned": {"5c6ed48ec8f98c0a": modulated.chroma_continuous},
            "ChromaAdaLayerNormZeroPruned": {"5d2cdaaa3566c0b7": modulated.chroma_zero},
            "ChromaAdaLayerNormZeroSinglePruned": {
                "db969a5da8107b32": modulated.chroma_zero_single
            },
        },
    ),
    **_diffusers(
        "transformers.transformer_cogview4",
        {
            "CogView4AdaLayerNormContinuous": _COGVIEW4_CONTINUOUS,
            "CogView4AdaLayerNormZero": _COGVIEW4_ZERO,
        },
    ),
    **_diffusers(
        "transformers.transformer_cosmos",
        {
            "CosmosAdaLayerNorm": {"92e2a218ad8e9e08": modulated.cosmos},
            "CosmosAdaLayerNormZero": {"43f91adf60c160e6": modulated.cosmos_zero},
        },
    ),
    **_diffusers(
        "transformers.transformer_easyanimate",
        {"EasyAnimateLayerNormZero": {"b409380e7b4c6241": modulated.easyanimate_zero}},
    ),
    **_diffusers(
        "transformers.transformer_flux3",
        {"Flux3AdaLayerNorm": {"03a1efc6b28e1b2f": modulated.flux3}},
    ),
    **_diffusers(
        "transformers.transformer_glm_image",
        {
            "GlmImageAdaLayerNormContinuous": _COGVIEW4_CONTINUOUS,
            "GlmImageAdaLayerNormZero": _COGVIEW4_ZERO,
        },
    ),
    **_diffusers("unets.unet_stable_cascade", {"SDCascadeLayerNorm": _DIFFUSERS_2D}),
    (
        "diffusers.pipelines.wuerstchen.modeling_wuerstchen_common",
        "WuerstchenLayerNorm",
    ): _DIFFUSERS_2D,
    (
        "diffusers.pipelines.deprecated.wuerstchen.modeling_wuerstchen_common",
        "WuerstchenLayerNorm",
    ): _DIFFUSERS_2D,
    **_transformers("bark", {"BarkLayerNorm": {"c1d493c5d7e8bcf9": forwards.shape_of_weight}}),
    **_transformers(
        "chameleon", {"ChameleonLayerNorm": {"362a7741cd606c05": forwards.parameters_of_heads}}
    ),
    **_transformers("cohere", {"CohereLayerNorm": _COHERE}),
    **_transformers("cohere2", {"Cohere2LayerNorm": _COHERE}),
    **_transformers("cohere2_moe", {"Cohere2MoeLayerNorm": _COHERE}),
    **_transformers("cohere_compass", {"CohereCompassLayerNorm": _COHERE}),
    **_transformers("convnext", {"ConvNextLayerNorm": _DATA_FORMAT}),
    **_transformers("convnextv2", {"ConvNextV2LayerNorm": _DATA_FORMAT}),
    **_transformers("deberta", {"DebertaLayerNorm": {"6863fff434c5e647": forwards.by_hand}}),
    **_transformers("deepseek_ocr2", {"DeepseekOcr2SamLayerNorm": _DATA_FORMAT}),
    **_transformers("deepseek_vl_hybrid", {"DeepseekVLHybridLayerNorm": _DATA_FORMAT}),
    **_transformers("dinov3_convnext", {"DINOv3ConvNextLayerNorm": _DATA_FORMAT}),
    **_transformers("edgetam", {"EdgeTamLayerNorm": _DATA_FORMAT}),
    **_transformers("edgetam_video", {"EdgeTamVideoLayerNorm": _DATA_FORMAT}),
    **_transformers("eomt", {"EomtLayerNorm2d": _EOMT_2D}),
    **_transformers("eomt_dinov3", {"EomtDinov3LayerNorm2d": _EOMT_2D}),
    **_transformers("esm.esmfold", {"EsmFoldLayerNorm": _ESM}),
    **_transformers("esmc", {"EsmcLayerNorm": {"b5c8b476ad3f062b": forwards.input_dtype}}),
    **_transformers(
        "esmfold2", {"EsmFold2LayerNorm": {"8b5366d5a350c204": forwards.transformers_float32}}
    ),
    **_transformers("got_ocr2", {"GotOcr2LayerNorm": _DATA_FORMAT}),
    **_transformers("lw_detr", {"LwDetrLayerNorm": _DATA_FORMAT}),
    **_transformers("nemotron", {"NemotronLayerNorm1P": _NEMOTRON}),
    **_transformers("olmo", {"OlmoLayerNorm": {"225f198317ebff26": forwards.without_parameters}}),
    **_transformers("pp_formulanet", {"PPFormulaNetLayerNorm": _DATA_FORMAT}),
    **_transformers("rf_detr", {"RfDetrLayerNorm": _DATA_FORMAT}),
    **_transformers("sam", {"SamLayerNorm": _DATA_FORMAT}),
    **_transformers("sam2", {"Sam2LayerNorm": _DATA_FORMAT}),
    **_transformers("sam2_video", {"Sam2VideoLayerNorm": _DATA_FORMAT}),
    **_transformers("sam3_tracker", {"Sam3TrackerLayerNorm": _DATA_FORMAT}),
    **_transformers("sam3_tracker_video", {"Sam3TrackerVideoLayerNorm": _DATA_FORMAT}),
    **_transformers("sam_hq", {"SamHQLayerNorm": _DATA_FORMAT}),
    **_transformers("seggpt", {"SegGptLayerNorm": _DATA_FORMAT}),
    **_transformers("slanext", {"SLANeXtLayerNorm": _DATA_FORMAT}),
    **_transformers(
        "squeezebert", {"SqueezeBertLayerNorm": {"eef1a372fdc3a18d": forwards.channels_first_1d}}
    ),
    **_transformers("unlimited_ocr", {"UnlimitedOcrSamLayerNorm": _DATA_FORMAT}),
    **_transformers("videomt", {"VideomtLayerNorm2d": _EOMT_2D}),
    **_transformers(
        "videoprism", {"VideoPrismLayerNorm": {"20daf2b7a4a39409": forwards.weight_plus_one}}
    ),
    **_transformers(
        "vitdet", {"VitDetLayerNorm": {"e720fd57aa8f8d09": forwards.channels_first_by_hand}}
    ),
}
