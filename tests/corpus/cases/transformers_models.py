"""Architectures of Hugging Face's transformers with tiny random weights, and PEFT."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from torch import Tensor, nn

from tests.corpus.case import ROWS, Case, Data, adam, floats, whole

LENGTH, WORDS, CLASSES = 8, 30, 3
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The names of older configurations.
N_SIZES = {
    "vocab_size": WORDS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
D_SIZES = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = {"image_size": 32, "num_channels": 3}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 8,
    **IMAGE,
}
WAVE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "num_feat_extract_layers": 2,
    "layerdrop": 0.0,
}

LENGTHS = whole(LENGTH + 1, begin=4, seed=9)
MASK = (np.arange(LENGTH)[None] < LENGTHS[:, None]).astype(np.int64)
IDS = whole(WORDS, LENGTH, begin=3) * MASK
LABELS = IDS.sum(1) % CLASSES
ENDED = np.where(np.arange(LENGTH)[None] == LENGTHS[:, None] - 1, 2, IDS)


def _data(**columns: np.ndarray) -> Data:
    return Data(columns, by_name=True)


TEXT = _data(input_ids=IDS, attention_mask=MASK, labels=LABELS)
PLACES = _data(input_ids=IDS, attention_mask=MASK, labels=np.where(MASK == 1, IDS % CLASSES, -100))
SPANS = _data(
    input_ids=IDS, attention_mask=MASK, start_positions=IDS[:, 0] % 4, end_positions=IDS[:, 1] % 4
)
CHOICES = _data(input_ids=whole(WORDS, 2, LENGTH, begin=3), labels=whole(2))
SEQUENCES = _data(
    input_ids=IDS, attention_mask=MASK, decoder_input_ids=np.roll(ENDED, 1, 1), labels=ENDED
)
PICTURES = _data(pixel_values=floats(3, 32, 32), labels=whole(CLASSES))
WAVES = _data(input_values=floats(160), labels=whole(CLASSES))
LANGUAGE = _data(input_ids=IDS, attention_mask=MASK)


def made(model: str, config: str, sizes: dict[str, Any], **options: Any) -> Any:
    """Return a function that makes a model from a configuration, by the names of their classes."""

    def model_of() -> nn.Module:
        chosen = getattr(transformers, config)(**{**sizes, **options})
        module: nn.Module = getattr(transformers, model)(chosen)
        return module

    return model_of


PATHS = "random paths"
WEIGHED = "the mean of the loss is over words, whose number differs between batches"


def own_loss(
    family: str,
    task: str = "ForSequenceClassification",
    *,
    data: Data = TEXT,
    sizes: dict[str, Any] = SIZES,
    config: str = "",
    labels: tuple[str, ...] = ("labels",),
    apart: str = "",
    **options: Any,
) -> Case:
    """A model that computes its loss from its labels."""
    given = {"num_labels": CLASSES, **options} if "Classification" in task else options
    model = made(f"{family}{task}", config or f"{family}Config", sizes, **given)
    return Case(
        f"{family}{task}", model, data, None, adam, label_arguments=labels, apart=apart, because=""
    )


def next_word(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Return the loss of a causal language model on its own words."""
    del ctx
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def causal(
    family: str,
    sizes: dict[str, Any] = SIZES,
    *,
    task: str = "ForCausalLM",
    step: Any = next_word,
    **options: Any,
) -> Case:
    """A causal language model with a step of the user, from columns of text alone."""
    model = made(f"{family}{task}", f"{family}Config", sizes, use_cache=False, **options)
    return Case(f"{family}{task}", model, LANGUAGE, None, adam, step=step, apart=WEIGHED)


CLASSIFIERS = [
    own_loss("Bert"),
    own_loss("Roberta"),
    own_loss(
        "DistilBert",
        sizes={
            "vocab_size": WORDS,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 32,
        },
    ),
    own_loss("Electra", embedding_size=8),
    own_loss("Albert", embedding_size=8),
    own_loss("Deberta"),
    own_loss("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    own_loss("MPNet"),
    own_loss("Camembert"),
    own_loss("XLMRoberta"),
    own_loss("ConvBert", embedding_size=8, head_ratio=1, num_groups=1),
    own_loss("RoFormer", embedding_size=16),
    own_loss("MobileBert", embedding_size=16, intra_bottleneck_size=16, num_feedforward_networks=1),
    own_loss("SqueezeBert", embedding_size=16),
    own_loss("FNet", data=_data(input_ids=IDS, labels=LABELS)),
    own_loss("Ernie"),
    own_loss(
        "ModernBert",
        global_attn_every_n_layers=2,
        local_attention=4,
        cls_token_id=1,
        sep_token_id=2,
    ),
    own_loss(
        "XLNet",
        sizes={"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    ),
    own_loss(
        "Funnel",
        sizes={
            "vocab_size": WORDS,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
        },
    ),
    own_loss("Nystromformer", segment_means_seq_len=8, num_landmarks=8),
    own_loss("BigBird", attention_type="original_full"),
    own_loss("Longformer", attention_window=4),
    own_loss(
        "Bart", sizes=D_SIZES, data=_data(input_ids=ENDED, attention_mask=MASK, labels=LABELS)
    ),
    own_loss("GPT2", sizes=N_SIZES),
    own_loss("Llama"),
    own_loss("Mistral", num_key_value_heads=1),
    own_loss("Qwen2", num_key_value_heads=1),
    own_loss(
        "T5",
        sizes={
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        data=_data(input_ids=ENDED, attention_mask=MASK, labels=LABELS),
    ),
]

TASKS = [
    own_loss("Bert", "ForTokenClassification", data=PLACES, apart=WEIGHED),
    own_loss(
        "Bert",
        "ForMaskedLM",
        data=_data(
            input_ids=IDS, attention_mask=MASK, labels=np.where(whole(3, LENGTH) == 0, IDS, -100)
        ),
        apart=WEIGHED,
    ),
    own_loss(
        "Bert", "ForQuestionAnswering", data=SPANS, labels=("start_positions", "end_positions")
    ),
    own_loss("Bert", "ForMultipleChoice", data=CHOICES),
    own_loss(
        "Bert",
        "ForNextSentencePrediction",
        data=_data(input_ids=IDS, attention_mask=MASK, labels=whole(2)),
    ),
    own_loss(
        "T5",
        "ForConditionalGeneration",
        sizes={
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        data=SEQUENCES,
    ),
    own_loss("Bart", "ForConditionalGeneration", sizes=D_SIZES, data=SEQUENCES),
    own_loss("MBart", "ForConditionalGeneration", sizes=D_SIZES, data=SEQUENCES),
    own_loss("Pegasus", "ForConditionalGeneration", sizes=D_SIZES, data=SEQUENCES),
    own_loss("M2M100", "ForConditionalGeneration", sizes=D_SIZES, data=SEQUENCES),
]

LANGUAGE_MODELS = [
    causal("GPT2", N_SIZES, task="LMHeadModel"),
    causal(
        "GPTNeo",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    causal("GPTNeoX"),
    causal("GPTJ", {**N_SIZES, "rotary_dim": 4}),
    causal("OPT", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}),
    causal(
        "Bloom",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0},
    ),
    causal("Llama", num_key_value_heads=1),
    causal("Mistral", num_key_value_heads=1),
    causal("Mixtral", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1),
    causal("Qwen2", num_key_value_heads=1),
    causal("Qwen3", num_key_value_heads=1, head_dim=8),
    causal("Gemma", num_key_value_heads=1, head_dim=8),
    causal("Gemma2", num_key_value_heads=1, head_dim=8),
    causal("Phi"),
    causal("Phi3", num_key_value_heads=1),
    causal("Falcon"),
    causal("Starcoder2", num_key_value_heads=1),
    causal("Cohere", num_key_value_heads=1),
    causal("Olmo"),
    causal(
        "Mamba",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "state_size": 4,
            "pad_token_id": 0,
        },
    ),
]

VISION = [
    own_loss("ViT", "ForImageClassification", data=PICTURES, sizes=VIT),
    own_loss("DeiT", "ForImageClassification", data=PICTURES, sizes=VIT),
    own_loss("Beit", "ForImageClassification", data=PICTURES, sizes=VIT, apart=PATHS),
    own_loss("Dinov2", "ForImageClassification", data=PICTURES, sizes=VIT),
    own_loss(
        "Swin",
        "ForImageClassification",
        data=PICTURES,
        apart=PATHS,
        sizes={
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 2,
            "patch_size": 4,
            **IMAGE,
        },
    ),
    own_loss(
        "ConvNext",
        "ForImageClassification",
        data=PICTURES,
        sizes={"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "num_channels": 3},
    ),
    own_loss(
        "ConvNextV2",
        "ForImageClassification",
        data=PICTURES,
        sizes={"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "num_channels": 3},
    ),
    own_loss(
        "ResNet",
        "ForImageClassification",
        data=PICTURES,
        sizes={
            "embedding_size": 8,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "layer_type": "basic",
        },
    ),
    own_loss(
        "RegNet",
        "ForImageClassification",
        data=PICTURES,
        sizes={"embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "groups_width": 8},
    ),
    own_loss(
        "MobileNetV2",
        "ForImageClassification",
        data=PICTURES,
        sizes={"depth_multiplier": 0.25, **IMAGE},
    ),
    own_loss(
        "MobileViT",
        "ForImageClassification",
        data=PICTURES,
        sizes={
            "hidden_sizes": [8, 8, 8],
            "neck_hidden_sizes": [8] * 7,
            "patch_size": 2,
            "num_attention_heads": 2,
            **IMAGE,
        },
    ),
    own_loss(
        "Segformer",
        "ForImageClassification",
        data=PICTURES,
        apart=PATHS,
        sizes={
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "num_encoder_blocks": 2,
        },
    ),
    own_loss(
        "Segformer",
        "ForSemanticSegmentation",
        data=_data(pixel_values=floats(3, 32, 32), labels=whole(2, 32, 32)),
        sizes={
            "num_labels": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "num_encoder_blocks": 2,
            "decoder_hidden_size": 8,
        },
    ),
]

AUDIO = [
    own_loss("Wav2Vec2", data=WAVES, sizes=WAVE),
    own_loss("Hubert", data=WAVES, sizes=WAVE),
    own_loss("WavLM", data=WAVES, sizes=WAVE),
    own_loss(
        "Wav2Vec2",
        "ForCTC",
        data=_data(input_values=floats(400), labels=whole(WORDS, 3, begin=1)),
        sizes={**WAVE, "ctc_loss_reduction": "mean", "pad_token_id": 0},
    ),
    own_loss(
        "AST",
        "ForAudioClassification",
        config="ASTConfig",
        data=_data(input_values=floats(24, 16), labels=whole(CLASSES)),
        sizes={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 24,
            "num_mel_bins": 16,
        },
    ),
    own_loss(
        "Whisper",
        "ForAudioClassification",
        data=_data(input_features=floats(8, 16), labels=whole(CLASSES)),
        sizes={
            **D_SIZES,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 8,
            "classifier_proj_size": 8,
        },
    ),
]


def clip_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    del ctx
    return model(
        input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], return_loss=True
    ).loss


def clip() -> nn.Module:
    text = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    )


def detection_step(model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> Tensor:
    """Return the loss of boxes, which a model takes as a list of dicts."""
    del ctx
    pairs = zip(batch["kind"], batch["boxes"], strict=True)
    labels = [{"class_labels": kind[None], "boxes": box[None].sigmoid()} for kind, box in pairs]
    return model(pixel_values=batch["pixel_values"], labels=labels).loss


def detector() -> nn.Module:
    config = transformers.YolosConfig(
        **{**VIT, "image_size": [32, 32]}, num_detection_tokens=4, num_labels=CLASSES
    )
    return transformers.YolosForObjectDetection(config)


class Wrapped(nn.Module):
    """A classifier of the user around a body of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = transformers.BertModel(transformers.BertConfig(**SIZES))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.last(
            self.body(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        )


def checkpointed() -> nn.Module:
    module = made("BertForSequenceClassification", "BertConfig", SIZES, num_labels=CLASSES)()
    module.gradient_checkpointing_enable()
    return module


def frozen() -> nn.Module:
    module = made("BertForSequenceClassification", "BertConfig", SIZES, num_labels=CLASSES)()
    module.bert.requires_grad_(requires_grad=False)
    return module


def patch_tst() -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        d_model=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
    )
    return transformers.PatchTSTForPrediction(config)


def mixer() -> nn.Module:
    config = transformers.PatchTSMixerConfig(
        context_length=16,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        num_input_channels=2,
        d_model=8,
        num_layers=1,
    )
    return transformers.PatchTSMixerForPrediction(config)


def time_series() -> nn.Module:
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=1,
        input_size=1,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        scaling=None,
    )
    return transformers.TimeSeriesTransformerForPrediction(config)


OTHERS = [
    Case(
        "PatchTSMixerForPrediction",
        mixer,
        _data(past_values=floats(16, 2), future_values=floats(4, 2)),
        None,
        adam,
        label_arguments=("future_values",),
        apart="statistics of batches",
    ),
    Case(
        "TimeSeriesTransformerForPrediction",
        time_series,
        _data(
            past_values=floats(10),
            past_time_features=floats(10, 1),
            past_observed_mask=np.ones((ROWS, 10), np.float32),
            future_values=floats(4),
            future_time_features=floats(4, 1),
        ),
        None,
        adam,
        label_arguments=("future_values",),
    ),
    Case(
        "CLIPModel",
        clip,
        _data(
            input_ids=np.where(
                np.arange(LENGTH)[None] == LENGTH - 1, 2, whole(WORDS, LENGTH, begin=3)
            ),
            pixel_values=floats(3, 32, 32),
        ),
        None,
        adam,
        step=clip_step,
        apart="compares the rows of a batch",
    ),
    Case(
        "own head",
        Wrapped,
        Data({"input_ids": IDS, "attention_mask": MASK}, {"c": LABELS}, by_name=True),
        nn.CrossEntropyLoss,
        adam,
        resumes=True,
    ),
    Case("gradient checkpointing", checkpointed, TEXT, None, adam, label_arguments=("labels",)),
    Case("frozen body", frozen, TEXT, None, adam, label_arguments=("labels",)),
    Case(
        "PatchTSTForPrediction",
        patch_tst,
        _data(past_values=floats(16, 2), future_values=floats(4, 2)),
        None,
        adam,
        label_arguments=("future_values",),
        apart="statistics of batches",
    ),
    Case(
        "AdamW groups and warmup",
        made("BertForSequenceClassification", "BertConfig", SIZES, num_labels=CLASSES),
        TEXT,
        None,
        adam,
        label_arguments=("labels",),
        scheduler=lambda o: transformers.get_linear_schedule_with_warmup(o, 2, 12),
        is_per_step=True,
        resumes=True,
    ),
]


# ----------------------------------------------------------------------------------------------------
# PEFT.


def tuned(kind: str, base: Any, task: str, **options: Any) -> Any:
    """Return a function that makes a model with adapters, by the name of their configuration."""

    def model() -> nn.Module:
        import peft

        return peft.get_peft_model(base(), getattr(peft, kind)(task_type=task, **options))

    return model


BERT = made("BertForSequenceClassification", "BertConfig", SIZES, num_labels=CLASSES)
LLAMA = made("LlamaForCausalLM", "LlamaConfig", SIZES, use_cache=False)


def adapters(
    name: str, kind: str, *, causal_model: bool = False, resumes: bool = False, **options: Any
) -> Case:
    """A model with adapters, all else frozen."""
    if causal_model:
        return Case(
            name,
            tuned(kind, LLAMA, "CAUSAL_LM", **options),
            LANGUAGE,
            None,
            adam,
            step=next_word,
            apart=WEIGHED,
            resumes=resumes,
        )
    return Case(
        name,
        tuned(kind, BERT, "SEQ_CLS", **options),
        TEXT,
        None,
        adam,
        label_arguments=("labels",),
        resumes=resumes,
    )


PEFT = [
    adapters("LoRA", "LoraConfig", r=2, target_modules=["query", "value"], resumes=True),
    adapters(
        "LoRA of all layers", "LoraConfig", r=2, target_modules="all-linear", lora_dropout=0.1
    ),
    adapters("DoRA", "LoraConfig", r=2, target_modules=["query", "value"], use_dora=True),
    adapters("rsLoRA", "LoraConfig", r=2, target_modules=["query", "value"], use_rslora=True),
    adapters(
        "LoRA of a language model",
        "LoraConfig",
        causal_model=True,
        r=2,
        target_modules=["q_proj", "v_proj"],
        resumes=True,
    ),
    adapters(
        "IA3 of a language model",
        "IA3Config",
        causal_model=True,
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    adapters("prompt tuning", "PromptTuningConfig", num_virtual_tokens=2),
    adapters(
        "prefix tuning of a language model",
        "PrefixTuningConfig",
        causal_model=True,
        num_virtual_tokens=2,
    ),
    adapters("LoHa", "LoHaConfig", r=2, alpha=2, target_modules=["query", "value"]),
    adapters("VeRA", "VeraConfig", r=2, target_modules=["query", "value"]),
    adapters("OFT", "OFTConfig", r=0, oft_block_size=2, target_modules=["query", "value"]),
]

assert len(IDS) == ROWS
CASES = [*CLASSIFIERS, *TASKS, *LANGUAGE_MODELS, *VISION, *AUDIO, *OTHERS, *PEFT]
