# SPDX-License-Identifier: Apache-2.0
"""The LayerNorm classes of other libraries, and what the source of each one's forward computes.

swap_layer_norm looks a class up by the names of its module and of itself, so no library is
imported. A class whose forward has a source that is not listed for it is not swapped.
`python ci/layer_norm_sources.py FOLDER` lists the classes and digests of any version of a package.
"""

from __future__ import annotations

from . import forwards, modulated
from .classes import Forward, Known
from .source import INHERITED

# From the digest of a forward's source (source.digest) to the forward that replaces it.
Sources = dict[str, Forward]

# timm 0.9.16 to 1.0.31, of which LayerNormExp2d is from 1.0 on; torchvision 0.25 to 0.29.
_TIMM_2D: Sources = {"79f26c715f41cfb4": forwards.timm_channels_first}
_TIMM_AND_TORCHVISION: dict[str, Sources] = {
    "timm.layers.norm.LayerNorm": {"9ed62333de30515c": forwards.timm_last_dims},
    "timm.layers.norm.LayerNormFp32": {"6ddb609b31e0ad34": forwards.float32},
    "timm.layers.norm.LayerNorm2d": _TIMM_2D,
    "timm.layers.norm.LayerNorm2dFp32": {"470ab09330b1e9b4": forwards.float32_channels_first},
    "timm.layers.norm.LayerNormExp2d": {"e15c1807eff808ab": forwards.timm_exp2d},
    "timm.layers.norm_act.LayerNormAct": {"e64a4ebf3f4690fe": forwards.timm_last_dims_act},
    "timm.layers.norm_act.LayerNormActFp32": {"833d6cd8a9829dec": forwards.float32_act},
    "timm.layers.norm_act.LayerNormAct2d": {"e4b35ecfd6e2c68c": forwards.timm_channels_first_act},
    "timm.layers.norm_act.LayerNormAct2dFp32": {
        "534a3be2dac9959c": forwards.float32_channels_first_act
    },
    "timm.models.metaformer.LayerNormNoBias": {INHERITED: forwards.last_dims},
    "timm.models.metaformer.LayerNorm2dNoBias": _TIMM_2D,
    "torchvision.models.convnext.LayerNorm2d": {"e35a0c84f522d0d0": forwards.channels_first},
}

# diffusers 0.30 to 0.42
_DIFFUSERS_2D: Sources = {"b8368036ad147b67": forwards.channels_first}
_DIFFUSERS: dict[str, Sources] = {
    "normalization.FP32LayerNorm": {"af7a0dca50e92d88": forwards.float32},
    "unets.unet_stable_cascade.SDCascadeLayerNorm": _DIFFUSERS_2D,
}
# The classes that modulate norms, by the names of these; with the digests of several releases.
_COGVIEW4_CONTINUOUS, _COGVIEW4_ZERO = "1a65221adbc46d72", "1af89a8ef57df395 442855f4498819c9"
_MODULATED: dict[tuple[str, ...], dict[str, str]] = {
    ("norm",): {
        "normalization.AdaLayerNorm": "fbcdc9f74fcac789",
        "normalization.AdaLayerNormContinuous": "961af26f6e036213",
        "normalization.AdaLayerNormZero": "072840286b6a1e18",
        "normalization.AdaLayerNormZeroSingle": "3b705ecdc0cc1898",
        "normalization.CogVideoXLayerNormZero": "0dda031af00ff245",
        "normalization.LuminaLayerNormContinuous": "eaab430818850a35",
        "normalization.SD35AdaLayerNormZeroX": "4f33ed13df517b4f",
        "transformers.hunyuan_transformer_2d.AdaLayerNormShift": "45eb5d767685e228",
        "transformers.transformer_chroma.ChromaAdaLayerNormContinuousPruned": "5c6ed48ec8f98c0a",
        "transformers.transformer_chroma.ChromaAdaLayerNormZeroPruned": "5d2cdaaa3566c0b7",
        "transformers.transformer_chroma.ChromaAdaLayerNormZeroSinglePruned": "db969a5da8107b32",
        "transformers.transformer_cogview4.CogView4AdaLayerNormContinuous": _COGVIEW4_CONTINUOUS,
        "transformers.transformer_cosmos.CosmosAdaLayerNorm": "92e2a218ad8e9e08",
        "transformers.transformer_cosmos.CosmosAdaLayerNormZero": "43f91adf60c160e6",
        "transformers.transformer_easyanimate.EasyAnimateLayerNormZero": "b409380e7b4c6241",
        "transformers.transformer_flux3.Flux3AdaLayerNorm": "03a1efc6b28e1b2f",
        "transformers.transformer_glm_image.GlmImageAdaLayerNormContinuous": _COGVIEW4_CONTINUOUS,
    },
    ("norm", "norm_context"): {
        "transformers.transformer_cogview4.CogView4AdaLayerNormZero": _COGVIEW4_ZERO,
        "transformers.transformer_glm_image.GlmImageAdaLayerNormZero": _COGVIEW4_ZERO,
    },
    ("norm_x", "norm_c"): {
        "normalization.CogView3PlusAdaLayerNormZeroTextImage": "43432242074f5369",
    },
}
_WUERSTCHEN = "wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm"

# transformers 4.49 to 5.23, by folder, file where it is not the folder's, and class
_DATA_FORMAT: Sources = {
    "c5771f134ac1e446": forwards.data_format,
    "ab6b0c69f427ea68": forwards.data_format_by_hand,  # before 5.0
}
_COHERE: Sources = {"0cdd061c391274fc": forwards.float32_without_bias}
_NEMOTRON: Sources = dict.fromkeys(
    (
        *("0abf9e58ecda9739", "cfaa4376d3cc18ef", "6574c9893600178c"),
        *("69391390c4a7994a", "0e2a31be74dbd94a", "5c6406639681a5e1"),
    ),
    forwards.weight_plus_one_outside_autocast,
)
_ESM: Sources = dict.fromkeys(
    ("956c45a98aa4def4", "5f6256884cf0867e", "466226a4874aaf9a"), forwards.esmfold
)
_TRANSFORMERS: dict[str, Sources] = {
    name: sources
    for names, sources in (
        ("bark.BarkLayerNorm", {"c1d493c5d7e8bcf9": forwards.shape_of_weight}),
        ("chameleon.ChameleonLayerNorm", {"362a7741cd606c05": forwards.parameters_of_heads}),
        (
            "cohere.CohereLayerNorm cohere2.Cohere2LayerNorm cohere2_moe.Cohere2MoeLayerNorm "
            "cohere_compass.CohereCompassLayerNorm",
            _COHERE,
        ),
        (
            "convnext.ConvNextLayerNorm convnextv2.ConvNextV2LayerNorm got_ocr2.GotOcr2LayerNorm "
            "deepseek_ocr2.DeepseekOcr2SamLayerNorm edgetam_video.EdgeTamVideoLayerNorm "
            "deepseek_vl_hybrid.DeepseekVLHybridLayerNorm dinov3_convnext.DINOv3ConvNextLayerNorm "
            "edgetam.EdgeTamLayerNorm lw_detr.LwDetrLayerNorm rf_detr.RfDetrLayerNorm "
            "pp_formulanet.PPFormulaNetLayerNorm sam.SamLayerNorm sam2.Sam2LayerNorm "
            "sam2_video.Sam2VideoLayerNorm sam3_tracker.Sam3TrackerLayerNorm "
            "sam3_tracker_video.Sam3TrackerVideoLayerNorm sam_hq.SamHQLayerNorm "
            "seggpt.SegGptLayerNorm slanext.SLANeXtLayerNorm "
            "unlimited_ocr.UnlimitedOcrSamLayerNorm",
            _DATA_FORMAT,
        ),
        ("deberta.DebertaLayerNorm", {"6863fff434c5e647": forwards.by_hand}),
        (
            "eomt.EomtLayerNorm2d eomt_dinov3.EomtDinov3LayerNorm2d videomt.VideomtLayerNorm2d",
            {"26e1adbf9895dc43": forwards.channels_first},
        ),
        ("esm.esmfold.EsmFoldLayerNorm", _ESM),
        ("esmc.EsmcLayerNorm", {"b5c8b476ad3f062b": forwards.input_dtype}),
        ("esmfold2.EsmFold2LayerNorm", {"8b5366d5a350c204": forwards.float32}),
        ("nemotron.NemotronLayerNorm1P", _NEMOTRON),
        ("olmo.OlmoLayerNorm", {"225f198317ebff26": forwards.without_parameters}),
        ("squeezebert.SqueezeBertLayerNorm", {"eef1a372fdc3a18d": forwards.channels_first_1d}),
        ("videoprism.VideoPrismLayerNorm", {"20daf2b7a4a39409": forwards.weight_plus_one}),
        ("vitdet.VitDetLayerNorm", {"e720fd57aa8f8d09": forwards.channels_first_by_hand}),
    )
    for name in names.split()
}


def _in_transformers(name: str) -> str:
    folder, *file, cls = name.split(".")
    return f"transformers.models.{folder}.modeling_{file[0] if file else folder}.{cls}"


def _by_module(path: str) -> tuple[str, str]:
    module, _, cls = path.rpartition(".")
    return module, cls


# By (module, class), from the digest of a forward's source to what is known of it.
CLASSES: dict[tuple[str, str], dict[str, Known]] = {
    _by_module(path): {digest: Known("layer", forward) for digest, forward in sources.items()}
    for path, sources in {
        **_TIMM_AND_TORCHVISION,
        **{f"diffusers.models.{name}": sources for name, sources in _DIFFUSERS.items()},
        f"diffusers.pipelines.{_WUERSTCHEN}": _DIFFUSERS_2D,
        f"diffusers.pipelines.deprecated.{_WUERSTCHEN}": _DIFFUSERS_2D,
        **{_in_transformers(name): sources for name, sources in _TRANSFORMERS.items()},
    }.items()
} | {
    _by_module(f"diffusers.models.{name}"): {
        digest: Known("layer", modulated.derived, norms, modulated.members)
        for digest in digests.split()
    }
    for norms, classes in _MODULATED.items()
    for name, digests in classes.items()
}
