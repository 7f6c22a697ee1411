"""Train a language model by Hugging Face's Trainer over this backend; with --sft adapters of it, by TRL's SFTTrainer on packed texts.

    sparkhvdrun -np 2 python examples/recipes/language_model.py [--sft]
    torchrun --nproc-per-node 2 examples/recipes/language_model.py [--sft]

Texts, tokenizer and a small Llama are made here, so that nothing is downloaded. Of yours: `AutoTokenizer.from_pretrained(name)` and
`AutoModelForCausalLM.from_pretrained(name)`. `pip install 'sparkhvd[hf]' accelerate datasets trl`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

SUBJECTS, VERBS = ["cat", "dog", "bird", "child"], ["sees", "hears", "follows", "knows"]
SPECIAL = ["<pad>", "<unk>", "</s>"]


def texts(rows: int, seed: int) -> list[str]:
    """Make texts of 2 to 6 sentences: who is seen in one sentence sees in the next."""
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        subject, words = rng.choice(SUBJECTS), []
        for _ in range(rng.randint(2, 6)):
            other = rng.choice(SUBJECTS)
            words += ["the", subject, rng.choice(VERBS), "the", other, "."]
            subject = other
        made.append(" ".join(words))
    return made


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, "the", ".", *SUBJECTS, *VERBS]
    raw = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "unk_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def small_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def by_trainer(arguments: dict[str, Any]) -> Trainer:
    """Train all weights on one text per row."""
    tokenizer = word_tokenizer()
    seen, held_out = (
        [{"input_ids": tokenizer(text + " </s>")["input_ids"]} for text in texts(rows, seed)]
        for rows, seed in ((256, 1), (64, 2))
    )
    return Trainer(
        small_llama(tokenizer),
        TrainingArguments(**arguments),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=seen,
        eval_dataset=held_out,
    )


def by_sft(arguments: dict[str, Any]) -> Trainer:
    """Train adapters, on rows of 48 tokens that hold several texts each."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    tokenizer = word_tokenizer()
    seen, held_out = (
        Dataset.from_dict({"text": texts(rows, seed)}) for rows, seed in ((512, 1), (64, 2))
    )
    return SFTTrainer(
        small_llama(tokenizer),
        SFTConfig(packing=True, packing_strategy="wrapped", max_length=48, **arguments),
        train_dataset=seen,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--backend", default="sparkhvd")
    given = parser.parse_args()
    if not dist.is_backend_available("sparkhvd"):
        import sparkhvd.distributed  # noqa: F401 - torch 2.14 and newer find it by themselves

    # Before the arguments: on CPUs Accelerate takes a group that is there, or else makes one of Gloo.
    dist.init_process_group(given.backend)
    with tempfile.TemporaryDirectory() as folder:
        trainer = (by_sft if given.sft else by_trainer)(
            {
                "output_dir": folder,
                "per_device_train_batch_size": 8,
                "num_train_epochs": given.epochs,
                "learning_rate": 0.01,
                "use_cpu": not torch.cuda.is_available(),  # else Accelerate trains each rank alone
                "bf16": False,
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
                "seed": 1,
            }
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    if dist.get_rank() == 0:
        backend, size = dist.get_backend(), dist.get_world_size()
        print(f"{size} ranks over {backend}: loss {before:.6f}, after training {after:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
