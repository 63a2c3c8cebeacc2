# SPDX-License-Identifier: Apache-2.0
"""What is known of other libraries: which forward of ours replaces one of which source.

A class is looked up by the names of its module and of itself, so no library is imported. A class
whose forward has a source that is not listed for it is not swapped. RMSNorms whose forwards call
nothing but torch, what the digest covers and the libraries' ACT2FN are known by the source alone,
in any module. `python ci/layer_norm_sources.py FOLDER` lists the classes and digests of any version
of a package.
"""

from __future__ import annotations

import re
from typing import Any

from . import channels, forwards, groups, liger, modulated, rms
from .classes import Known
from .source import INHERITED, INHERITED_GROUP

# From the digest of a forward's source (source.digest) to what is known of it.
Sources = dict[str, Known]
CLASSES: dict[tuple[str, str], Sources] = {}  # by (module, class)
SOURCES: Sources = {}  # for classes of any module


def _path(library: str, name: str) -> tuple[str, str]:
    module, _, cls = name.rpartition(".")
    if library == "transformers:":  # the folder, and the file where it is not the folder's
        folder, _, file = module.partition(".")
        module = f"models.{folder}.modeling_{file or folder}"
    elif library == "diffusers:" and not module.startswith("pipelines."):
        module = f"models.{module}"
    return f"{library[:-1]}.{module}", cls


# With either of two sources, of which the second is from before transformers 5.
_DATA_FORMAT = """transformers: convnext.ConvNextLayerNorm convnextv2.ConvNextV2LayerNorm
    deepseek_ocr2.DeepseekOcr2SamLayerNorm deepseek_vl_hybrid.DeepseekVLHybridLayerNorm
    dinov3_convnext.DINOv3ConvNextLayerNorm edgetam.EdgeTamLayerNorm
    edgetam_video.EdgeTamVideoLayerNorm got_ocr2.GotOcr2LayerNorm lw_detr.LwDetrLayerNorm
    pp_formulanet.PPFormulaNetLayerNorm rf_detr.RfDetrLayerNorm sam.SamLayerNorm
    sam2.Sam2LayerNorm sam2_video.Sam2VideoLayerNorm sam3_tracker.Sam3TrackerLayerNorm
    sam3_tracker_video.Sam3TrackerVideoLayerNorm sam_hq.SamHQLayerNorm seggpt.SegGptLayerNorm
    slanext.SLANeXtLayerNorm unlimited_ocr.UnlimitedOcrSamLayerNorm"""
# Each row: the name of a forward, digests, and classes behind their library; without classes it is
# of any module. The forward `name+act` calls the class's activation behind the norm.
# timm 0.9.16 to 1.0.31, of which LayerNormExp2d is from 1.0 on; torchvision 0.25 to 0.29;
# diffusers 0.30 to 0.42; transformers 4.49 to 5.23
_LAYERS = f"""\
timm_last_dims 9ed62333de30515c timm: layers.norm.LayerNorm
float32 6ddb609b31e0ad34 timm: layers.norm.LayerNormFp32
timm_channels_first 79f26c715f41cfb4 timm: layers.norm.LayerNorm2d
    models.metaformer.LayerNorm2dNoBias
float32_channels_first 470ab09330b1e9b4 timm: layers.norm.LayerNorm2dFp32
timm_exp2d e15c1807eff808ab timm: layers.norm.LayerNormExp2d
timm_last_dims+act e64a4ebf3f4690fe timm: layers.norm_act.LayerNormAct
float32+act 833d6cd8a9829dec timm: layers.norm_act.LayerNormActFp32
timm_channels_first+act e4b35ecfd6e2c68c timm: layers.norm_act.LayerNormAct2d
float32_channels_first+act 534a3be2dac9959c timm: layers.norm_act.LayerNormAct2dFp32
last_dims {INHERITED} timm: models.metaformer.LayerNormNoBias
channels_first e35a0c84f522d0d0 torchvision: models.convnext.LayerNorm2d
channels_first b8368036ad147b67 diffusers: unets.unet_stable_cascade.SDCascadeLayerNorm
    pipelines.wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm
    pipelines.deprecated.wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm
float32 af7a0dca50e92d88 diffusers: normalization.FP32LayerNorm
shape_of_weight c1d493c5d7e8bcf9 transformers: bark.BarkLayerNorm
parameters_of_heads 362a7741cd606c05 transformers: chameleon.ChameleonLayerNorm
float32_without_bias 0cdd061c391274fc transformers: cohere.CohereLayerNorm
    cohere2.Cohere2LayerNorm cohere2_moe.Cohere2MoeLayerNorm cohere_compass.CohereCompassLayerNorm
data_format c5771f134ac1e446 {_DATA_FORMAT}
data_format_by_hand ab6b0c69f427ea68 {_DATA_FORMAT}
by_hand 6863fff434c5e647 transformers: deberta.DebertaLayerNorm
channels_first 26e1adbf9895dc43 transformers: eomt.EomtLayerNorm2d
    eomt_dinov3.EomtDinov3LayerNorm2d videomt.VideomtLayerNorm2d
esmfold 956c45a98aa4def4,5f6256884cf0867e,466226a4874aaf9a transformers:
    esm.esmfold.EsmFoldLayerNorm
input_dtype b5c8b476ad3f062b transformers: esmc.EsmcLayerNorm
float32 8b5366d5a350c204 transformers: esmfold2.EsmFold2LayerNorm
weight_plus_one_outside_autocast 0abf9e58ecda9739,cfaa4376d3cc18ef,6574c9893600178c
    transformers: nemotron.NemotronLayerNorm1P
weight_plus_one_outside_autocast 69391390c4a7994a,0e2a31be74dbd94a,5c6406639681a5e1
    transformers: nemotron.NemotronLayerNorm1P
without_parameters 225f198317ebff26 transformers: olmo.OlmoLayerNorm
channels_first_1d eef1a372fdc3a18d transformers: squeezebert.SqueezeBertLayerNorm
weight_plus_one 20daf2b7a4a39409 transformers: videoprism.VideoPrismLayerNorm
channels_first_by_hand e720fd57aa8f8d09 transformers: vitdet.VitDetLayerNorm
"""
# Each begins with the names of the norms that the class modulates.
_MODULATED = """\
norm fbcdc9f74fcac789 diffusers: normalization.AdaLayerNorm
norm 961af26f6e036213 diffusers: normalization.AdaLayerNormContinuous
norm 072840286b6a1e18 diffusers: normalization.AdaLayerNormZero
norm 3b705ecdc0cc1898 diffusers: normalization.AdaLayerNormZeroSingle
norm 0dda031af00ff245 diffusers: normalization.CogVideoXLayerNormZero
norm eaab430818850a35 diffusers: normalization.LuminaLayerNormContinuous
norm 4f33ed13df517b4f diffusers: normalization.SD35AdaLayerNormZeroX
norm_x+norm_c 43432242074f5369 diffusers: normalization.CogView3PlusAdaLayerNormZeroTextImage
norm 45eb5d767685e228 diffusers: transformers.hunyuan_transformer_2d.AdaLayerNormShift
norm 5c6ed48ec8f98c0a diffusers: transformers.transformer_chroma.ChromaAdaLayerNormContinuousPruned
norm 5d2cdaaa3566c0b7 diffusers: transformers.transformer_chroma.ChromaAdaLayerNormZeroPruned
norm db969a5da8107b32 diffusers: transformers.transformer_chroma.ChromaAdaLayerNormZeroSinglePruned
norm 1a65221adbc46d72 diffusers:
    transformers.transformer_cogview4.CogView4AdaLayerNormContinuous
    transformers.transformer_glm_image.GlmImageAdaLayerNormContinuous
norm+norm_context 1af89a8ef57df395,442855f4498819c9 diffusers:
    transformers.transformer_cogview4.CogView4AdaLayerNormZero
    transformers.transformer_glm_image.GlmImageAdaLayerNormZero
norm 92e2a218ad8e9e08 diffusers: transformers.transformer_cosmos.CosmosAdaLayerNorm
norm 43f91adf60c160e6 diffusers: transformers.transformer_cosmos.CosmosAdaLayerNormZero
norm b409380e7b4c6241 diffusers: transformers.transformer_easyanimate.EasyAnimateLayerNormZero
norm 03a1efc6b28e1b2f diffusers: transformers.transformer_flux3.Flux3AdaLayerNorm
"""
# timm 1.0; transformers 4.49 and 5.24; diffusers 0.30 to 0.42
_RMS = """\
timm d0e2b3b49ca8e71a timm: layers.norm.RmsNorm
timm_float32 7f474bfa4b5a5f60 timm: layers.norm.RmsNormFp32
timm+act 975efdc84e7ee6e8 timm: layers.norm_act.RmsNormAct
timm_float32+act b9e5d6981e9b73e6 timm: layers.norm_act.RmsNormActFp32
llama 9aaa8062417d9115
llama4 2af31c4f7ac50dc5,123bdb1d786a09aa
gemma 43a0d58fee9e76ef
rounded_once d6a51c3a5b31576c,eb467367c10653c2
rounded_once_eps 2c1a2de9d1a44734
gemma3n a31d41136392f84f
weightless 7ebb08f2bf238dc7,3d411fe6cc9e0759
t5 25d06d4ab2c9feed
muse_spark c3c2aa5ebb8a73de
gemma_groups ace041eee8c95f9c
imagegpt ed0eb72c0adec64b
qwen3_next_gated 0f0b35a595eff49a
kimi_gated 84f5ab0d60236efd
mamba2_gated 35a4d513b3aa44c0
mamba2_gated_whole 0f4f182eb64f10d5  # before there were groups
falcon_h1_gated 90c76e9f8d19627d
falcon_h1_gated_squeezed b80440363034ddd1  # of transformers 5.17 and before
diffusers 4a55fc3e2c9bfd95,2daaa7b4d1199477  # the second 0.33 to 0.36, and later
diffusers_without_bias bdcf2fe671f49cc9  # to 0.31
rounded_once_eps 2f02abc83856eb33,6a4f345d68fd8b59,1c7542beb3b9a42c
krea2 e86e9d2a242a4654
gemma 74ab8bc808740333
stable_audio3 d7c8fcca5a00079e
"""
# timm 1.0; diffusers 0.42: Wan, Qwen-Image, HunyuanVideo 1.5, HunyuanImage; Kandinsky 6; LTX-2
_CHANNELS = """\
timm d58ebe86897249b0 timm: layers.norm.RmsNorm2d
timm_float32 31fca9e5fcaea623 timm: layers.norm.RmsNorm2dFp32
timm+act 1a13e421e59ac70c timm: layers.norm_act.RmsNormAct2d
timm_float32+act 42f7fd3cbf902e5e timm: layers.norm_act.RmsNormAct2dFp32
wan 768a8b47f0d234dd
kandinsky6 d3ad42d3bc4808d2
per_channel 7a53c35dab801a62
"""
# timm 1.0, diffusers 0.42 and transformers 5.24
_GROUPS = f"""\
timm 1a67bdcebd2c4f36 timm: layers.norm.GroupNorm layers.norm.GroupNorm1
    models.metaformer.GroupNorm1NoBias
timm_act 20fabd42e1d1ff92 timm: layers.norm_act.GroupNormAct layers.norm_act.GroupNorm1Act
ada 304d5a49f63200b8 diffusers: normalization.AdaGroupNorm
kandinsky3 368447d5724720ec diffusers: unets.unet_kandinsky3.Kandinsky3ConditionalGroupNorm
cosmos 8277782117b299c0 diffusers: autoencoders.autoencoder_kl_cosmos.CosmosCausalGroupNorm
bit e2db88806e2c6156 transformers: bit.BitGroupNormActivation
emu3 39ad848f9088321d transformers: emu3.Emu3VQVAEGroupNorm
pe_audio f705f66458a989ec transformers: pe_audio.PeAudioMaskedGroupNorm
    pe_audio_video.PeAudioVideoMaskedGroupNorm pe_video.PeVideoMaskedGroupNorm
of_group_norm {INHERITED_GROUP} transformers: poolformer.PoolFormerGroupNorm
"""
# liger-kernel 0.8.5. LigerRMSNormForGemma4 and ...ForMuseGlimmer have forwards of their own.
_LIGER_RMS = """\
rms_norm 2a515c6ab90304b0 liger_kernel: transformers.rms_norm.LigerRMSNorm
    transformers.rms_norm.LigerRMSNormForGemma transformers.rms_norm.LigerRMSNormForGemma2
    transformers.rms_norm.LigerRMSNormForGemma3 transformers.rms_norm.LigerRMSNormForGlm4
    transformers.rms_norm.LigerRMSNormForMuseGlimmerTextCentered
    transformers.rms_norm.LigerRMSNormForOlmo2 transformers.rms_norm.LigerRMSNormForQwen3Next
"""
_LIGER_LAYER = "layer_norm 18bbdca3525db81b liger_kernel: transformers.layer_norm.LigerLayerNorm"


def _known(kind: str, of: Any, name: str) -> Known:
    if of is modulated:
        return Known(kind, of.derived, (*name.split("+"),), of.members)
    forward = getattr(of, name.removesuffix("+act"))
    return Known(kind, forwards.then_act(forward) if name.endswith("+act") else forward)


for _kind, _of, _text in (
    ("layer", forwards, _LAYERS),
    ("layer", modulated, _MODULATED),
    ("layer", liger, _LIGER_LAYER),
    ("rms", rms, _RMS),
    ("rms", channels, _CHANNELS),
    ("rms", liger, _LIGER_RMS),
    ("group", groups, _GROUPS),
):
    for _row in re.split(r"\n(?! )", re.sub(" *#.*", "", _text).strip()):
        _name, _digests, *_classes = _row.split()
        _sources = dict.fromkeys(_digests.split(","), _known(_kind, _of, _name))
        if not _classes:
            SOURCES.update(_sources)
        for _cls in _classes[1:]:
            CLASSES.setdefault(_path(_classes[0], _cls), {}).update(_sources)
