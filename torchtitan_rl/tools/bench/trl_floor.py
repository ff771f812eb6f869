"""GRPO's steps by TRL, one whenever a line comes in: a program for the Python of an environment that has TRL.

    PYTHON trl_floor.py WORK.json

It imports nothing of this package. WORK.json is what `bench.stepping.write_work` writes. The program prints `ready`,
then after each line of its standard input takes a step and prints the seconds of the step. Completions have the lengths
that WORK.json says: the end-of-sequence token is drawn at the last place of each, and nowhere before.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


class EndAt(LogitsProcessor):
    """Forbids and forces the end-of-sequence token, so that row b gets lengths_B[b] tokens."""

    def __init__(self, lengths: list[int], prompt_tokens: int, eos: int) -> None:
        self._lengths_B, self._prompt_tokens, self._eos = torch.tensor(lengths), prompt_tokens, eos

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        last_B = (self._lengths_B == input_ids.shape[1] - self._prompt_tokens + 1).to(scores.device)
        scores[last_B] = -torch.inf
        scores[:, self._eos] = torch.where(last_B, 0.0, -torch.inf)
        return scores


def with_lengths(model_class: type[PreTrainedModel], eos: int) -> type[PreTrainedModel]:
    """A subclass whose completions have the lengths in `lengths`."""

    class WithLengths(model_class):
        lengths: list[int] = []

        def generate(self, input_ids, **options):
            ends = EndAt(self.lengths, input_ids.shape[1], eos)
            return super().generate(input_ids=input_ids, logits_processor=LogitsProcessorList([ends]), **options)

    return WithLengths


class StepByOrder(TrainerCallback):
    """Waits for a line before each step, and prints the step's seconds after it."""

    def __init__(self, answers) -> None:
        self._answers, self._began = answers, 0.0

    def on_step_begin(self, args, state, control, **more):
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **more):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(time.perf_counter() - self._began, file=self._answers, flush=True)


def share_of_digits(completions: list[str], **more) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


def main(work: dict, answers) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    plain = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32, attn_implementation="sdpa")
    model_class = with_lengths(type(plain), tokenizer.eos_token_id)
    model = model_class.from_pretrained(work["model"], dtype=torch.float32, attn_implementation="sdpa")
    print("ready", file=answers, flush=True)
    for part in work["parts"]:
        model.lengths = part["lengths"]
        with tempfile.TemporaryDirectory() as scratch:
            config = GRPOConfig(
                output_dir=scratch,
                use_cpu=not torch.cuda.is_available(),
                bf16=work["bf16"],
                max_steps=part["steps"],
                per_device_train_batch_size=len(part["lengths"]) // work["microbatches"],
                gradient_accumulation_steps=work["microbatches"],
                num_generations=work["group_size"],
                max_completion_length=max(part["lengths"]),
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                loss_type="dapo",  # a mean over tokens
                epsilon=work["clip"],
                beta=0.0,
                learning_rate=work["lr"],
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=work["max_norm"],
                optim="adamw_torch_fused",
                gradient_checkpointing=False,
                shuffle_dataset=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=share_of_digits,
                args=config,
                train_dataset=Dataset.from_dict({"prompt": part["prompts"]}),
                processing_class=tokenizer,
                callbacks=[StepByOrder(answers)],
            )
            trainer.train()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as to_bench:
        os.dup2(2, 1)  # what others print is no answer
        main(json.loads(Path(sys.argv[1]).read_text()), to_bench)
